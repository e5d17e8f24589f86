"""Slots at an agreed rate, and the times at which hidden messages return."""

import pytest

from celery_sqs_backoff.provider.rate import AHEAD_SECONDS, RETURN_SHARE, Times
from tests.support.cases import cases

APART = 1 / (10 * RETURN_SHARE)


@cases(
    "times now slots returns expected free_at",
    {
        "one over the rate apart": (Times(), 5.0, 3, 0, ([5.0, 5.1, 5.2], []), 5.3),
        "none of the past": (Times(7.0), 99.0, 2, 0, ([99.0, 99.1], []), 99.2),
        "none far away": (Times(5.9), 5.0, 9, 0, ([5.9, 6.0], []), 6.1),
        "all near ones are taken": (Times(6.1), 5.0, 9, 0, ([], []), 6.1),
        "back when slots are free": (Times(6.0), 5.0, 1, 2, ([6.0], [6.1, 6.1 + APART]), 6.1),
        "back after the others": (Times(5.0, 9.0), 5.0, 0, 2, ([], [9.0, 9.0 + APART]), 5.0),
    },
)
def test_take(times, now, slots, returns, expected, free_at):
    """A worker takes slots one over the rate apart, not in the past and not far ahead.

    Hidden messages return when slots are free, at their own share of the rate.
    """
    assert times.take_slots(slots, now, 10.0) == pytest.approx(expected[0])
    assert times.take_returns([99.0] * returns, now, 10.0) == pytest.approx(expected[1])
    assert times.free_at == pytest.approx(free_at)


def test_return_too_far() -> None:
    """A time of return that is too far for a message is left to another one."""
    times = Times(5.0, 9.0)
    assert times.take_returns([4.2, 3.9, 4.2, 4.2], 5.0, 10.0) == [
        pytest.approx(9.0),
        None,
        pytest.approx(9.0 + APART),
        None,
    ]
    assert times.back_at == pytest.approx(9.0 + 2 * APART)


@pytest.mark.parametrize("rate", [0.001, 0.5, 20.0, 1000.0])
def test_rate_holds(rate):
    """However often workers ask, slots are one over the rate apart, and none is lost."""
    times, now, taken = Times(), 0.0, list[float]()
    while len(taken) < 200:
        taken += times.take_slots(7, now, rate)
        now = max(now, times.free_at - AHEAD_SECONDS)
    assert taken == pytest.approx([number / rate for number in range(len(taken))])
