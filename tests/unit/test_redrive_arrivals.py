"""What reaches SQS within a second, with calls that take now longer, now shorter."""

import heapq
import random

import pytest

from celery_sqs_backoff.redrive.arrivals import Arrivals
from celery_sqs_backoff.redrive.pace import Pace

from .test_redrive_pace import most_in_a_second

SENDERS = 16


def arrivals_of(rate, *, seconds, call_seconds, guarded=True):
    """When messages arrive that some senders send, each as soon as it may."""
    pace, arrivals = Pace(rate), Arrivals(rate if guarded else None)
    size = pace.batch_size(0.0)
    found = []
    #: When, who, and what then: "reserve" a slot, "begin" the call, or "end" the one begun at.
    events = [(0.0, sender, "reserve", 0.0) for sender in range(SENDERS)]
    while events:
        now, sender, what, began = heapq.heappop(events)
        if now > seconds:
            continue
        if what == "end":
            arrivals.end(size, began, now)
        if what in ("reserve", "end"):
            heapq.heappush(events, (max(now, pace.reserve(size, now)), sender, "begin", 0.0))
        elif wait := arrivals.begin(size, now):
            heapq.heappush(events, (now + wait, sender, "begin", 0.0))
        else:
            ends_at = now + call_seconds()
            found += [(now + ends_at) / 2] * size
            heapq.heappush(events, (ends_at, sender, "end", now))
    return sorted(found)


def calls(least, most, seed=1):
    rng = random.Random(seed)
    return lambda: rng.uniform(least, most)


@pytest.mark.parametrize("rate", [1, 10, 59.5, 200, 450, 1_000])
@pytest.mark.parametrize("call_seconds", [calls(0.01, 0.03), calls(0.005, 0.15)])
def test_no_second_holds_more_than_the_rate_and_one(rate, call_seconds):
    found = arrivals_of(rate, seconds=8, call_seconds=call_seconds)
    assert most_in_a_second(found) <= rate + 1


def test_the_pace_alone_does_not_see_to_that():
    found = arrivals_of(200, seconds=8, call_seconds=calls(0.005, 0.15), guarded=False)
    assert most_in_a_second(found) > 201


@pytest.mark.parametrize("rate", [10, 200, 1_000])
def test_with_the_usual_latency_the_rate_is_kept_within_two_per_cent(rate):
    found = arrivals_of(rate, seconds=31, call_seconds=calls(0.01, 0.03))
    assert len(found) / (found[-1] - found[0]) == pytest.approx(rate, rel=0.02)


def test_slow_calls_cost_some_of_the_rate():
    found = arrivals_of(200, seconds=31, call_seconds=lambda: 0.1)
    assert len(found) / (found[-1] - found[0]) == pytest.approx(201 / 1.05, rel=0.02)


def test_a_call_that_is_under_way_counts_until_it_has_ended():
    arrivals = Arrivals(1)
    assert arrivals.begin(2, 0.0) == 0
    assert 0 < arrivals.begin(1, 9.0) < 0.1, "look again soon"
    arrivals.end(2, 0.0, 10.0)
    assert arrivals.begin(2, 10.0) == 0, "it has arrived five seconds ago"


def test_a_shorter_call_corrects_what_was_reckoned_of_earlier_ones():
    """The first call also connects: half of that is no measure."""
    arrivals = Arrivals(1)
    arrivals.begin(1, 0.0)
    arrivals.end(1, 0.0, 1.0)
    arrivals.begin(1, 1.0)
    arrivals.end(1, 1.0, 1.2)
    assert arrivals.begin(1, 1.55) == pytest.approx(0.35), "at 0.9 and 1.1, not at 0.5 and 1.1"


def test_without_a_rate_nothing_waits():
    arrivals = Arrivals(None)
    for _ in range(100):
        assert arrivals.begin(10, 0.0) == 0
        arrivals.end(10, 0.0, 0.0)
