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
def test_no_second_holds_more_than_the_rate_and_one(rate, messages, rng):
    """However the receives divide the messages into batches; here each message goes alone."""
    times = slots(Throttle(rate), messages=messages, rng=rng)
    assert most_in_a_second(times) <= ceil(rate) + 1


@given(st.floats(160, 800), st.integers(1, 900), st.randoms())
def test_a_second_that_begins_with_a_batch_holds_it_whole(rate, messages, rng):
    pace = Throttle(rate)
    times = slots(pace, messages=messages, rng=rng)
    assert most_in_a_second(times) <= rate + 2 * pace.batch_size(0.0)


@given(st.floats(1, 700), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_a_sender_who_was_late_does_not_catch_up(rate, late):
    """The one that was late counts in its second, too; and of half a message there is a whole."""
    pace = Throttle(rate)
    times = slots(pace, messages=len(late), lateness=lambda i: late[i])
    assert most_in_a_second(times) <= ceil(rate) + 1 + 2 * pace.batch_size(0.0)


@pytest.mark.parametrize("rate", [5, 10, 37, 60, 100, 500])
def test_the_rate_is_kept_within_two_per_cent_over_half_a_minute(rate):
    """With a sender who is up to a third of a slot late each time."""
    pace = Throttle(rate)
    times = slots(pace, messages=30 * rate, lateness=lambda i: (i % 3) / 9 / rate)
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.02)


def test_a_batch_goes_at_the_slot_of_its_last_message():
    pace = Throttle(200)
    assert pace.reserve(2, 0.0) == pytest.approx(0.005)
    assert pace.reserve(2, 0.0) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("rate", "size"),
    [(None, 10), (5, 1), (159, 1), (160, 2), (400, 5), (800, 10), (9e9, 10)],
)
def test_batches_are_small_enough_for_the_rate(rate, size):
    assert Throttle(rate).batch_size(0.0) == size


def test_without_a_limit_nothing_waits():
    pace = Throttle(None)
    assert [pace.reserve(10, t) for t in (0.0, 0.0, 5.0)] == [0.0, 0.0, 5.0]
    assert pace.rate_at(1.0) is None


def test_a_ramp_begins_at_a_tenth_and_ends_at_the_rate():
    pace = Throttle(10, ramp=100)
    pace.reserve(1, 0.0)
    assert [round(pace.rate_at(t), 6) for t in (0, 50, 100, 999)] == [1, 5.5, 10, 10]


@given(st.integers(1, 200), st.integers(1, 100))
def test_a_ramp_is_never_faster_than_its_rate(rate, ramp):
    times = slots(Throttle(rate, ramp=ramp), messages=min(400, rate * 5))
    assert most_in_a_second(times[-100:]) <= rate + 1


@given(rates, st.floats(0, 1_000), st.integers(1, 10_000))
def test_the_estimate_lies_between_no_ramp_and_a_tenth_of_the_rate(rate, ramp, messages):
    estimate = seconds_for(messages, rate, ramp)
    assert messages / rate * 0.999 <= estimate <= messages / rate / RAMP_FROM * 1.001


def test_the_estimate_is_what_the_pace_takes():
    times = slots(Throttle(20, ramp=30), messages=1_000)
    assert seconds_for(1_000, 20, 30) == pytest.approx(times[-1], rel=0.02)
