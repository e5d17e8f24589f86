"""The throttle of a redrive keeps the rate, in messages per second, that the operator asks for.

A sender reserves a slot for each batch. The slot is the time at which it may send the batch.
"""

from bisect import bisect_right
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.redrive.throttle import RAMP_FROM, Throttle, seconds_for

rates = st.floats(0.1, 2_000)


def send_times(pace, *, messages, lateness=lambda i: 0.0, rng=None):
    """Return the send times of a sender that reserves the next slot as soon as it has sent."""
    now, times = 0.0, []
    while len(times) < messages:
        size = min(pace.batch_size(now), messages - len(times))
        size = rng.randint(1, size) if rng else size
        now = max(now, pace.reserve(size, now)) + lateness(len(times))
        times += [now] * size
    return times


def most_in_a_second(times):
    """Return the largest number of times within one second. The times must be sorted."""
    return max(i + 1 - bisect_right(times, t - 1) for i, t in enumerate(times))


@given(st.floats(0.5, 159), st.integers(1, 900), st.randoms())
def test_rate_in_each_second(rate, messages, rng):
    """Up to a rate of 159, no second has more messages than the rate plus one.

    At these rates, a sender sends single messages.
    """
    times = send_times(Throttle(rate), messages=messages, rng=rng)
    assert most_in_a_second(times) <= ceil(rate) + 1


@given(st.floats(160, 800), st.integers(1, 900), st.randoms())
def test_batch_at_edge_of_second(rate, messages, rng):
    """From a rate of 160, no second has more messages than the rate plus two batches.

    At these rates, a sender sends batches.
    """
    pace = Throttle(rate)
    times = send_times(pace, messages=messages, rng=rng)
    assert most_in_a_second(times) <= rate + 2 * pace.batch_size(0.0)


@given(st.floats(1, 700), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_late_sender(rate, late):
    """A sender that was late does not send faster afterwards."""
    pace = Throttle(rate)
    times = send_times(pace, messages=len(late), lateness=lambda i: late[i])
    assert most_in_a_second(times) <= ceil(rate) + 1 + 2 * pace.batch_size(0.0)


@pytest.mark.parametrize("rate", [5, 10, 37, 60, 100, 500])
def test_rate_over_half_a_minute(rate):
    """Over half a minute the throttle keeps the rate within 2 %, even if the sender is late."""
    pace = Throttle(rate)
    times = send_times(pace, messages=30 * rate, lateness=lambda i: (i % 3) / 9 / rate)
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.02)


def test_slot_of_batch():
    """The slot of a batch is the time at which its last message may be sent."""
    pace = Throttle(200)
    assert pace.reserve(2, 0.0) == pytest.approx(0.005)
    assert pace.reserve(2, 0.0) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("rate", "size"),
    [(None, 10), (5, 1), (159, 1), (160, 2), (400, 5), (800, 10), (9e9, 10)],
)
def test_batch_size(rate, size):
    """The lower the rate, the smaller are the batches."""
    assert Throttle(rate).batch_size(0.0) == size


def test_without_limit():
    """Without a rate, no message waits."""
    pace = Throttle(None)
    assert [pace.reserve(10, t) for t in (0.0, 0.0, 5.0)] == [0.0, 0.0, 5.0]
    assert pace.rate_at(1.0) is None


def test_ramp():
    """With a ramp, the rate rises from a tenth of its value to its full value."""
    pace = Throttle(10, ramp=100)
    pace.reserve(1, 0.0)
    assert [round(pace.rate_at(t), 6) for t in (0, 50, 100, 999)] == [1, 5.5, 10, 10]


@given(st.integers(1, 200), st.integers(1, 100))
def test_ramp_below_rate(rate, ramp):
    """With a ramp, the sender never sends more than the full rate."""
    times = send_times(Throttle(rate, ramp=ramp), messages=min(400, rate * 5))
    assert most_in_a_second(times[-100:]) <= rate + 1


@given(rates, st.floats(0, 1_000), st.integers(1, 10_000))
def test_bounds_of_estimate(rate, ramp, messages):
    """The estimated time is at least the time without a ramp, and at most ten times as long."""
    estimate = seconds_for(messages, rate, ramp)
    assert messages / rate * 0.999 <= estimate <= messages / rate / RAMP_FROM * 1.001


def test_estimate():
    """The estimated time of a redrive is within 2 % of the time that the throttle takes."""
    times = send_times(Throttle(20, ramp=30), messages=1_000)
    assert seconds_for(1_000, 20, 30) == pytest.approx(times[-1], rel=0.02)
