"""A short run of the benchmark that measures the cost of ``provider=``."""

from __future__ import annotations

from benchmarks.provider import measure


def test_provider():
    """While a provider answers, ``provider=`` makes no call to SQS."""
    seconds, calls = measure(repetitions=1, runs=10)
    assert (len(seconds), calls) == (1, 0)
