"""A short run of the benchmark that measures the cost of ``provider=``."""

from __future__ import annotations

from benchmarks.provider import measure
from benchmarks.recovery import Scene, play


def test_provider():
    """While a provider answers, ``provider=`` makes no call to SQS."""
    seconds, calls = measure(repetitions=1, runs=10)
    assert (len(seconds), calls) == (1, 0)


def test_recovery():
    """A simulated backlog ends, but no sooner than the provider can take it."""
    figures = play(Scene(workers=2, outage=30.0, backlog=10.0), seed=0)
    assert 1.0 <= figures.ratio < 3.0
    assert 0 < figures.wasted < 60
