"""The rate holds for every message, in every second."""

from bisect import bisect_right
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.redrive.throttle import RAMP_FROM, Throttle, seconds_for

rates = st.floats(0.1, 2_000)


def slots(pace, *, messages, lateness=lambda i: 0.0, rng=None):
    """Send times of a sender who asks for a slot as soon as the last one is used."""
    now, times = 0.0, []
    while len(times) < messages:
        size = min(pace.batch_size(now), messages - len(times))
        size = rng.randint(1, size) if rng else size
        now = max(now, pace.reserve(size, now)) + lateness(len(times))
        times += [now] * size
    return times


def most_in_a_second(times):
    """Of times in their order."""
    return max(i + 1 - bisect_right(times, t - 1) for i, t in enumerate(times))


@given(st.floats(0.5, 159), st.integers(1, 900), st.randoms())
def test_rate_in_each_second(rate, messages, rng):
    """No second holds more messages than the rate and one.

    This holds however the receives divide the messages into batches. Here, each message goes alone.
    """
    times = slots(Throttle(rate), messages=messages, rng=rng)
    assert most_in_a_second(times) <= ceil(rate) + 1


@given(st.floats(160, 800), st.integers(1, 900), st.randoms())
def test_batch_at_edge_of_second(rate, messages, rng):
    """A second that begins with a batch holds the rate and at most two batches."""
    pace = Throttle(rate)
    times = slots(pace, messages=messages, rng=rng)
    assert most_in_a_second(times) <= rate + 2 * pace.batch_size(0.0)


@given(st.floats(1, 700), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_late_sender(rate, late):
    """A sender that was late does not catch up.

    Its late message also counts in that second, and half a message counts as one.
    """
    pace = Throttle(rate)
    times = slots(pace, messages=len(late), lateness=lambda i: late[i])
    assert most_in_a_second(times) <= ceil(rate) + 1 + 2 * pace.batch_size(0.0)


@pytest.mark.parametrize("rate", [5, 10, 37, 60, 100, 500])
def test_rate_over_half_a_minute(rate):
    """The throttle keeps the rate within 2 % over half a minute.

    The sender is up to a third of a slot late each time.
    """
    pace = Throttle(rate)
    times = slots(pace, messages=30 * rate, lateness=lambda i: (i % 3) / 9 / rate)
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.02)


def test_slot_of_batch():
    """A batch goes at the slot of its last message."""
    pace = Throttle(200)
    assert pace.reserve(2, 0.0) == pytest.approx(0.005)
    assert pace.reserve(2, 0.0) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("rate", "size"),
    [(None, 10), (5, 1), (159, 1), (160, 2), (400, 5), (800, 10), (9e9, 10)],
)
def test_batch_size(rate, size):
    """Batches are small enough for the rate."""
    assert Throttle(rate).batch_size(0.0) == size


def test_without_limit():
    """Without a limit, no message waits."""
    pace = Throttle(None)
    assert [pace.reserve(10, t) for t in (0.0, 0.0, 5.0)] == [0.0, 0.0, 5.0]
    assert pace.rate_at(1.0) is None


def test_ramp():
    """A ramp begins at a tenth of the rate and ends at the rate."""
    pace = Throttle(10, ramp=100)
    pace.reserve(1, 0.0)
    assert [round(pace.rate_at(t), 6) for t in (0, 50, 100, 999)] == [1, 5.5, 10, 10]


@given(st.integers(1, 200), st.integers(1, 100))
def test_ramp_below_rate(rate, ramp):
    """A ramp is never faster than its rate."""
    times = slots(Throttle(rate, ramp=ramp), messages=min(400, rate * 5))
    assert most_in_a_second(times[-100:]) <= rate + 1


@given(rates, st.floats(0, 1_000), st.integers(1, 10_000))
def test_bounds_of_estimate(rate, ramp, messages):
    """The estimate lies between the time without a ramp and ten times as long."""
    estimate = seconds_for(messages, rate, ramp)
    assert messages / rate * 0.999 <= estimate <= messages / rate / RAMP_FROM * 1.001


def test_estimate():
    """The estimate is within 2 % of the time that the throttle takes."""
    times = slots(Throttle(20, ramp=30), messages=1_000)
    assert seconds_for(1_000, 20, 30) == pytest.approx(times[-1], rel=0.02)
