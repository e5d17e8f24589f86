"""Run tests that compute beside tests that wait, so that a parallel run keeps both cores busy.

Acceptance and integration tests mostly wait for workers and servers. Unit tests and simulations
compute. In pytest's own order, all tests that wait would come before all tests that compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from xdist.scheduler import LoadFileScheduling

#: The file with the seconds of each test file and of each slow test. ``make durations`` writes it.
_FILE = Path(__file__).with_name("durations.txt")

#: A unit test that takes longer is not part of ``make quick``.
SLOW_SECONDS = 0.25

_COMPUTING = ("tests/unit/", "tests/rig/", "tests/simulation/", "tests/mutants/")


class Lanes(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Give each process whole test files, longest first.

    The first process gets the files that compute.
    """

    def _assign_work_unit(self, node: Any) -> None:
        computes = node.gateway.id == "gw0"
        files = [file for file in self.workqueue if file.startswith(_COMPUTING) == computes]
        longest = max(files or self.workqueue, key=lambda file: seconds().get(file, 1.0))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


@cache
def seconds() -> Mapping[str, float]:
    """Return the recorded seconds of each test file and each slow test, by name.

    The name of a test has no parameters.
    """
    lines = _FILE.read_text().splitlines() if _FILE.exists() else []
    return {name: float(figure) for figure, _, name in (line.partition(" ") for line in lines)}


def seconds_of(nodeid: str) -> float:
    """Return the recorded seconds of a test. If it is fast or new, return 0."""
    file, _, name = nodeid.partition("[")[0].partition("::")
    return seconds().get(f"{file}::{name.rpartition('::')[2]}", 0.0)


def record(junit: Path) -> None:
    """Write the file of durations from pytest's report of a whole run (``--junit-xml``)."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        names = case.get("classname", "").split(".")
        while names and not (path := Path(*names).with_suffix(".py")).exists():
            names.pop()
        taken = float(case.get("time", 0.0))
        test = f"{path}::{case.get('name', '').partition('[')[0]}"
        found[str(path)] = found.get(str(path), 0.0) + taken
        found[test] = max(found.get(test, 0.0), taken)
    kept = {name: s for name, s in found.items() if "::" not in name or s > SLOW_SECONDS}
    _FILE.write_text("".join(f"{kept[name]:.2f} {name}\n" for name in sorted(kept)))


if __name__ == "__main__":
    import sys

    record(Path(sys.argv[1]))
