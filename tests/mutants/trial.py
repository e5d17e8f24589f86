"""Run tests on a mutant, or measure which lines they reach, in a process of its own."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import pytest

from ..lanes import seconds, seconds_of
from .mutate import PACKAGE, ROOT, Mutant, planted

#: The rooms that can have mutants, and the folders of the tests that run on them.
ROOMS = ("worker", "task", "safe", "redrive", "provider")
_FOLDERS = ("tests/unit", "tests/rig", "tests/simulation")
LONGEST_TEST_SECONDS = 0.5


class Planted(importlib.abc.MetaPathFinder):
    """Import one module of the package from a changed syntax tree."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._name = f"{PACKAGE.name}.{name}"
        assert self._name not in sys.modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        code = compile(planted(self._mutant), spec.origin, "exec")
        spec.loader.get_code = lambda name: code
        return spec


class Chosen:
    """A pytest plugin that runs only the chosen tests, fast files first, and notes which fail."""

    def __init__(self, tests: set[str] | None = None) -> None:
        self._tests = tests
        self.passed: list[str] = []
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        """Make Hypothesis stop at the first example that fails, and not look for a smaller one."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(phases=phases))
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in sorted(items, key=lambda item: seconds().get(item.location[0], 0.0))
            if seconds_of(item.nodeid) <= LONGEST_TEST_SECONDS
            and (self._tests is None or item.nodeid in self._tests)
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


class Measured(Chosen):
    """A pytest plugin that runs all tests, and notes which test reaches which line."""

    def __init__(self, lines: coverage.Coverage) -> None:
        super().__init__()
        self._lines = lines

    def pytest_collection_finish(self) -> None:
        self._lines.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        self._lines.stop()
        self._lines.save()


def in_a_process(target, *arguments, limit):
    """Run a function in a new process that has not imported our package, and return its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["boto3", "celery.app.builtins", "hypothesis", "pytest"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(target, theirs, *arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit) else (None, "time limit")
    except EOFError:
        return None, "process ended"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(target, answers: Connection, *arguments) -> None:
    os.setsid()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        answers.send(target(*arguments))


def try_mutant(mutant: Mutant, tests: set[str]) -> tuple[int, str]:
    sys.meta_path.insert(0, Planted(mutant))
    chosen = Chosen(tests)
    files = sorted({test.partition("::")[0] for test in tests})
    return int(_pytest(chosen, "-x", *files)), chosen.failed


def measure(folder: Path) -> None:
    lines = coverage.Coverage(
        data_file=str(folder / "coverage"),
        config_file=False,
        source=[str(PACKAGE / room) for room in ROOMS],
        concurrency=["thread", "greenlet"],
    )
    measured = Measured(lines)
    _pytest(measured, *_FOLDERS)
    (folder / "passed.json").write_text(json.dumps(sorted(measured.passed)))


def _pytest(plugin: Chosen, *arguments: str) -> int:
    quiet = ("-q", "--tb=no", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
    return pytest.main([*quiet, *arguments], plugins=[plugin])
