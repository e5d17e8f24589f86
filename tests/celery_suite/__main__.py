"""Run Celery's and kombu's own tests with stock tasks and with our task class, and compare.

``python -m tests.celery_suite 5.7`` runs all parts of the tests on Celery 5.7. Without a version it
runs them on each version that we support. ``--part`` selects one part, and ``--paths`` some of its
tests. ``--here`` uses the Celery of this environment, and makes no environment per version.

The exit code is 1 if a test passes with stock tasks and fails with ours, unless ``differences.txt``
gives a reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.redis_database import redis_url
from tests.support.servers import ministack

from .compare import Comparison, compare, read_known, read_outcomes
from .environment import CACHE, LINES, ROOT, Environment, environment, installed
from .plugin import BROKER, OUTCOMES, TASK_CLASS

OURS = "celery_sqs_backoff:SQSBackoffTask"

#: By name of the part: the package that has the tests, and the paths of the tests. The integration
#: tests use a worker process on a local SQS.
PARTS = {
    "unit": ("celery", ["t/unit"]),
    # Before version 5.7, kombu has its tests of SQS in one file.
    "kombu": (
        "kombu",
        ["t/unit/transport/SQS", "t/unit/transport/test_SQS.py", "t/unit/asynchronous/aws"],
    ),
    "integration": ("celery", ["t/integration/test_tasks.py", "t/integration/test_canvas.py"]),
}

#: pytest's exit codes when it has run all tests. With the second, some tests have failed.
_ENDED_WELL = (0, 1)

#: The result backend of the integration tests.
_RESULTS = redis_url()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", description=__doc__)
    parser.add_argument(
        "lines", nargs="*", metavar="version", help=f"of Celery: {', '.join(LINES)}; default: all"
    )
    parser.add_argument("--part", choices=[*PARTS], action="append", help="default: all parts")
    parser.add_argument("--paths", nargs="+", help="run only these tests of the part")
    parser.add_argument(
        "--here", action="store_true", help="use the Celery that is installed in this environment"
    )
    options = parser.parse_args(arguments)
    if options.here and options.lines:
        parser.error("--here uses the installed version of Celery: give no other")
    if unknown := set(options.lines) - {*LINES}:
        parser.error(f"unknown version {', '.join(unknown)}: expected {', '.join(LINES)}")
    new = 0
    environments = [installed()] if options.here else map(environment, options.lines or LINES)
    for where in environments:
        for part in options.part or PARTS:
            new += _compare(where, part, options.paths)
    return 1 if new else 0


def _compare(where: Environment, part: str, paths: Sequence[str] | None) -> int:
    """Run a part twice, print the differences, and return how many are new."""
    package, of_part = PARTS[part]
    source = where.source(package)
    tests = paths or [path for path in of_part if (source / path).exists()]
    outcomes = [_run(where, source, tests, task_class, part) for task_class in (None, OURS)]
    if not outcomes[0]:
        _say(f"{where.line} {part}: no test ran with stock tasks; see {CACHE}/{where.line}")
        return 1
    found = compare(*outcomes, known=read_known(), version=where.line)
    _say(_spell(where.line, part, found))
    return len(found.new)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _spell(line: str, part: str, found: Comparison) -> str:
    lines = [
        f"Celery {line}, {part}: {found.passed} pass on both, {found.failed_on_both} fail on both,"
        f" {len(found.known)} known differences, {len(found.new)} new"
    ]
    lines += [f"  new: {test}" for test in found.new]
    lines += [f"  no longer different: {each.pattern}" for each in found.gone]
    return "\n".join(lines)


def _run(
    where: Environment, source: Path, tests: Sequence[str], task_class: str | None, part: str
) -> dict[str, str]:
    name = "ours" if task_class else "stock"
    outcomes = CACHE / where.line / f"{part}-{name}.jsonl"
    outcomes.unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), OUTCOMES: str(outcomes)}
    env.pop("PYTEST_ADDOPTS", None)
    if task_class:
        env[TASK_CLASS] = task_class
    command = [
        *(str(where.python), "-m", "pytest", "-q", "--continue-on-collection-errors"),
        *("-p", "tests.celery_suite.plugin", "-p", "no:cacheprovider", "--timeout", "120"),
        *("-p", "no:rerunfailures"),
        *tests,
    ]
    with _services(part) as services, outcomes.with_suffix(".log").open("wb") as log:
        done = subprocess.run(command, cwd=source, env=env | services, stdout=log, stderr=log)
    if done.returncode not in _ENDED_WELL:
        _say(f"{where.line} {part}, {name}: pytest ended with {done.returncode}; see {log.name}")
        return {}
    return read_outcomes(outcomes)


@contextmanager
def _services(part: str) -> Iterator[dict[str, str]]:
    """Yield the variables that the part's tests need. For integration tests, start a local SQS."""
    if part != "integration":
        yield {}
        return
    with ministack() as endpoint, tempfile.TemporaryDirectory(prefix="celery-suite-") as directory:
        broker = endpoint.replace("http://", "sqs://testing:testing@")
        yield {
            BROKER: broker,
            "TEST_BROKER": broker,
            "TEST_BACKEND": _RESULTS,
            "TMPDIR": str(Path(directory)),
        }


if __name__ == "__main__":
    sys.exit(main())
