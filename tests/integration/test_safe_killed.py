"""What has taken effect outside when the processes of the tasks were killed at any moment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.record import Record

from .safe_killed import ORDERS, STEPS
from .stores import served

KILLS = 8


@pytest.mark.parametrize("name", ["postgresql", "mariadb", "dynamodb", "redis"])
def test_processes_that_are_killed_do_no_work_twice_and_owe_none(name: str, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    with served(name, tmp_path) as there:
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.integration.safe_killed"),
                *(there.url, json.dumps(there.database), str(KILLS), "7", str(record.path)),
            ],
            check=True,
            timeout=90,
        )
    messages, keys, undone = defaultdict(set), defaultdict(set), defaultdict(list)
    for entry in record.entries():
        if "undone" in entry:
            undone[entry["undone"]].append(entry)
        elif entry.get("key"):
            keys[entry["what"]].add(entry["key"])
        elif "what" in entry:
            messages[entry["what"]].add(entry["message"])
    # A guard lets one message pass; a step is repeated under its key only, and by nobody else.
    assert {what: len(ids) for what, ids in messages.items()} == {f"mail {n}": 1 for n in ORDERS}
    wanted = {f"{task} {n} {s}" for task in ("fund", "refused") for n in ORDERS for s in STEPS}
    assert {what: len(found) for what, found in keys.items()} == dict.fromkeys(wanted, 1)
    # What was given up is taken back once, the last step first.
    assert set(undone) == {what for what in wanted if what.startswith("refused")}
    assert all(len({entry["id"] for entry in found}) == 1 for found in undone.values())
    for order in ORDERS:
        first = [undone[f"refused {order} {step}"][0]["at"] for step in STEPS]
        assert first == sorted(first, reverse=True)
