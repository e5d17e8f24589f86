"""The benchmarks that measure parts of the worker, in their shortest form."""

from __future__ import annotations

from benchmarks.provider import measure


def test_provider():
    """A provider that is well costs no call to SQS."""
    seconds, calls = measure(repetitions=1, runs=10)
    assert (len(seconds), calls) == (1, 0)
