"""The benchmarks start and count right. Their figures are not tested."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import kombu
import pytest

ROOT = Path(__file__).parents[2]

#: This code runs in a process of its own, because each scenario's app becomes the current app.
SMALL_RUN = """
from benchmarks.measure import Setup, bench
from benchmarks.tasks import SCENARIOS

with bench(latency_ms=0) as server:
    for scenario, failures in {scenarios}:
        assert scenario in SCENARIOS
        run = server.run(Setup(scenario=scenario, tasks=12, failures=failures))
        print(scenario, run.executions, run.calls_per_execution("SendMessage") * run.executions)
"""


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "expected",
    [
        pytest.param({("ours-retry", 1): "ours-retry 24 0.0"}, id="short"),
        pytest.param(
            {
                ("ours-retry", 1): "ours-retry 24 0.0",
                ("stock-autoretry", 1): "stock-autoretry 24 12.0",
                ("kombu-backoff", 1): "kombu-backoff 24 0.0",
            },
            marks=pytest.mark.long,
            id="beside-stock-celery",
        ),
    ],
)
def test_small_run(expected):
    """The benchmark counts each execution once, and only autoretry sends copies."""
    if kombu.VERSION[:2] == (5, 5):  # with this version, stock workers wait minutes in long polls
        expected = dict(islice(expected.items(), 1))
    output = run_python("-c", SMALL_RUN.format(scenarios=list(expected)))
    assert output.splitlines() == list(expected.values())


def test_overhead():
    """The benchmark reports the CPU time of our task and of a plain one, and their ratio."""
    output = run_python("-m", "benchmarks.overhead", "--repetitions=1", "--runs=10")
    assert "SQSBackoffTask" in output
    assert "ratio" in output


def test_observers():
    """The benchmark of observers gives one figure for each repetition."""
    code = (
        "from benchmarks.observe import microseconds_per_task\n"
        "print(len(microseconds_per_task(tasks=20, repetitions=2)))"
    )
    assert run_python("-c", code).split() == ["2"]


@pytest.mark.parametrize("module", ["worker", "scale", "overhead", "loop_lag"])
def test_help(module):
    """Each benchmark explains its options with ``--help``."""
    assert run_python("-m", f"benchmarks.{module}", "--help").startswith("Usage:")
