"""A provider that is down: few calls meanwhile, and everything soon afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 60


class Down(Exception):
    """The provider does not answer."""


def send(task: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=task.name, number=number, failed=is_down)
    if is_down:
        raise Down


options: dict[str, Any] = {
    "base": SQSBackoffTask,
    "bind": True,
    "retry_on": Down,
    "backoff": FullJitter(base=1, cap=60),
}
provider = Provider("mail", probe_interval=1, longest_probe_interval=4)
app.task(name="provider.mail", provider=provider, **options)(send)
app.task(name="provider.other", **options)(send)


def test_an_outage_costs_few_calls_and_is_over_soon(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """Held for 45 s and more while it was down; recalled within seconds when it is not."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    for number in range(MAILS):
        stage.send("provider.mail", number, str(flag))
    with stage.worker(concurrency=2):
        eventually(lambda: stage.messages()[0] == 0, timeout=30)
        time.sleep(5)  # the outage lasts
        calls = [run for run in stage.runs("provider.mail") if run["failed"]]
        assert len(calls) <= 25, "threshold, runs under way, probes"
        stage.send("provider.other", 1, str(tmp_path / "up"))
        eventually(lambda: stage.runs("provider.other"), timeout=10)
        flag.unlink()
        began = time.monotonic()
        stage.wait_until_settled(timeout=40)
        took = time.monotonic() - began
    sent = sorted(run["number"] for run in stage.runs("provider.mail") if not run["failed"])
    assert sent == list(range(MAILS)), "each once"
    assert stage.dead_letters() == []
    assert took < 40
