"""Print the test files of a room, as in ``python -m tests.rooms redrive unit rig``.

A room is a subpackage, such as ``redrive``. If the folder or the name of a test file contains the
name of a room, the file belongs to this room. Otherwise a file that runs a worker or its parts
belongs to the room ``worker``. Any other file belongs to each room from which it imports. A file
that imports from no room belongs to ``house``.

The words after the room name the folders of ``tests`` to list. Without them, all folders count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import celery_sqs_backoff

ROOMS = (
    *("retry", "sqs", "task", "worker", "provider", "safe", "redrive", "observe"),
    *("doctor", "simulate", "classifiers", "commands", "house"),
)

TESTS = Path(__file__).parent
_WITH_A_WORKER = {"acceptance", "rig", "simulation"}


def test_files(room: str) -> list[Path]:
    """Return the test files of a room, in order."""
    if room not in ROOMS:
        raise ValueError(f"invalid room {room!r}: expected one of {', '.join(ROOMS)}")
    return [file for file in sorted(TESTS.rglob("test_*.py")) if room in rooms_of(file)]


@cache
def rooms_of(file: Path) -> set[str]:
    """Return the rooms that a test file belongs to, at least one."""
    folders = file.relative_to(TESTS).parent.parts
    for word in (*folders, *file.stem.split("_")):
        if word in ROOMS:
            return {word}
    if _WITH_A_WORKER.intersection(folders):
        return {"worker"}
    return {room for room in _imported_from(file) if room in ROOMS} or {"house"}


def _imported_from(file: Path) -> Iterator[str]:
    """Yield the names of the subpackages and modules of our package that a file imports from."""
    package = celery_sqs_backoff.__name__
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module == package:
                exported = [getattr(celery_sqs_backoff, alias.name, None) for alias in node.names]
                modules = [getattr(value, "__module__", "") for value in exported]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case _:
                modules = []
        yield from (module.split(".")[1] for module in modules if module.startswith(f"{package}."))


def main(arguments: list[str]) -> None:
    """Print the test files of a room on one line."""
    room, *folders = arguments or [""]
    try:
        files = [file.relative_to(TESTS) for file in test_files(room)]
    except ValueError as exc:
        sys.exit(str(exc))
    found = [f"tests/{file}" for file in files if not folders or file.parts[0] in folders]
    sys.stdout.write(f"{' '.join(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
