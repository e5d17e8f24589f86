"""Make mutants of the package, and run the tests that reach them.

A mutant is the package with one mistake in it. A run first measures which test reaches which line.
It leaves out tests that take more than half a second, and tests with workers or servers. The same
source and seed draw the same mutants, so you can compare two runs line by line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import coverage
import pytest

from .mutate import PACKAGE, ROOT, Mutant, draw
from .trial import ROOMS, in_a_process, measure, try_mutant

VERDICTS = ("killed", "survived", "not reached")
LIMIT_SECONDS = 120.0  # for the tests of one mutant. After this time it counts as killed


class Reach:
    """Knows which tests reach a line. A run measures this again only if a file has changed."""

    def __init__(self, only: tuple[str, ...] = ()) -> None:
        key = hashlib.sha256()
        for file in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.*")]):
            if file.is_file() and "__pycache__" not in file.parts:
                key.update(file.read_bytes())
        folder = ROOT / ".cache" / "mutants" / key.hexdigest()[:16]
        if not (folder / "passed.json").exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True)
            in_a_process(measure, folder, limit=None)
        self._lines = coverage.CoverageData(str(folder / "coverage"))
        self._lines.read()
        passed = json.loads((folder / "passed.json").read_text())
        self.tests = {test for test in passed if not only or test.startswith(only)}

    def of(self, mutant: Mutant) -> set[str]:
        """Return the tests that reach a mutant's line, or its file if the line runs at import."""
        found = self._of_file(PACKAGE / mutant.file)
        lines = mutant.lines or found
        return {test for line in lines for test in found.get(line, ())} & self.tests

    @cache  # noqa: B019 - there is one instance for the whole run
    def _of_file(self, file: Path) -> dict[int, list[str]]:
        return self._lines.contexts_by_lineno(str(file))


def main() -> None:
    """Print the verdict on each mutant, and the figures of each room."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", nargs="*", help=f"of {', '.join(ROOMS)}; default: all of them")
    parser.add_argument("--number", type=int, default=80, help="how many mutants of each room [80]")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others [0]")
    parser.add_argument("--jobs", type=int, default=1, help="how many to test at a time [1]")
    parser.add_argument("--tests", nargs="+", default=(), help="run only these test files")
    given = parser.parse_args()
    rooms = given.room or ROOMS
    if unknown := set(rooms) - set(ROOMS):
        parser.error(f"no mutants of {', '.join(unknown)}: expected one of {', '.join(ROOMS)}")
    reach = Reach(tuple(given.tests))
    print(f"{len(reach.tests)} tests", flush=True)
    figures = {room: Counter[str]() for room in rooms}
    with ThreadPoolExecutor(given.jobs) as pool:
        for room in rooms:
            mutants = draw(room, given.number, given.seed)
            verdicts = pool.map(_tried, mutants, map(reach.of, mutants))
            for mutant, (verdict, why) in zip(mutants, verdicts, strict=True):
                figures[room][verdict] += 1
                where = f"{mutant.file}:{mutant.line}"
                print(f"{verdict:11} {where}  {mutant.change}  {why}", flush=True)
    print(f"\n{'':10}", *(f"{verdict:>12}" for verdict in VERDICTS))
    for room, count in {**figures, "all": sum(figures.values(), Counter())}.items():
        print(f"{room:10}", *(f"{count[verdict]:12}" for verdict in VERDICTS))


def _tried(mutant: Mutant, tests: set[str]) -> tuple[str, str]:
    """Return the verdict on a mutant, and which test failed or how many tests passed."""
    if not tests:
        return "not reached", ""
    code, failed = in_a_process(try_mutant, mutant, tests, limit=LIMIT_SECONDS)
    if code == pytest.ExitCode.OK:
        return "survived", f"({len(tests)} tests)"
    return "killed", f"({failed or code})"


if __name__ == "__main__":
    main()
