"""How long a message may be retried, and hidden."""

from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff import Exponential, FullJitter, Policy, Schedule
from celery_sqs_backoff.retry.budget import (
    GiveUpReason,
    draw_delay,
    find_reason,
    find_reason_before_run,
    receives_needed,
    shrink,
    tolerant,
)
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.sqs.delivery import Delivery
from tests.support.cases import cases

NOW = 1_800_000_000.0
HOUR = 3600.0


def delivery(**facts):
    facts.setdefault("received_at", NOW)
    return Delivery(message_id="m", queue_url="https://sqs.example/1/q", **facts)


def why(facts, *, retries=0, max_retries=None, retry_for=36 * HOUR, delay=0.0, now=NOW):
    return find_reason(
        delivery(**facts).standing(retries=retries, now=now),
        max_retries=max_retries,
        retry_for=retry_for,
        delay=delay,
    )


@cases(
    "facts budget reason",
    {
        "nothing is known: go on": ({}, {}, None),
        "no max_retries: the time decides": ({}, {"retries": 10_000}, None),
        "third retry of three": ({}, {"retries": 2, "max_retries": 3}, None),
        "fourth of three": ({}, {"retries": 3, "max_retries": 3}, GiveUpReason.MAX_RETRIES),
        "0 = never": ({}, {"max_retries": 0}, GiveUpReason.MAX_RETRIES),
        "a second before": ({"first_received_at": NOW - 36 * HOUR + 1}, {}, None),
        "36 h are over": ({"first_received_at": NOW - 36 * HOUR}, {}, GiveUpReason.RETRY_FOR),
        "back a second before": ({}, {"retry_for": 60, "delay": 59}, None),
        "just too long": ({}, {"retry_for": 60, "delay": 60}, GiveUpReason.DELAY_TOO_LONG),
        "cannot fit": ({}, {"retry_for": 600, "delay": 3600}, GiveUpReason.DELAY_TOO_LONG),
        "back when it is over": (
            {"first_received_at": NOW - 30},
            {"retry_for": 60, "delay": 30},
            GiveUpReason.RETRY_FOR,
        ),
        "the wait for the ETA does not count": (
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - 10, "deferrals": 4},
            {},
            None,
        ),
        "due for 37 hours": (
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - 37 * HOUR},
            {},
            GiveUpReason.RETRY_FOR,
        ),
        "no earlier receive was a run": (
            {"first_received_at": NOW - 50 * HOUR, "deferrals": 4, "receive_count": 5},
            {},
            None,
        ),
        "None = for ever": ({"first_received_at": NOW - 900 * HOUR}, {"retry_for": None}, None),
        "0 = no time at all": ({}, {"retry_for": 0.0}, GiveUpReason.RETRY_FOR),
        "one receive left": ({"receive_count": 4, "max_receive_count": 5}, {}, None),
        "SQS would move it at the next receive": (
            {"receive_count": 5, "max_receive_count": 5},
            {},
            GiveUpReason.MAX_RECEIVE_COUNT,
        ),
        "retention would delete it": (
            {"sent_at": NOW - 3600, "retention_seconds": 3600 + 299},
            {},
            GiveUpReason.RETENTION,
        ),
        "an hour left": ({"sent_at": NOW - 3600, "retention_seconds": 7200}, {}, None),
    },
)
def test_first_spent_budget(facts, budget, reason):
    """The reason to give up is the first budget that is spent."""
    assert why(facts, **budget) is reason


@pytest.mark.parametrize(
    ("delay", "asked"),
    [(0, 1), (0.001, 1), (1, 1), (1.01, 2), (59.2, 60), (1e9, 43_140), (float("inf"), 43_140)],
)
def test_whole_seconds(delay, asked):
    """The worker asks SQS for a delay in whole seconds, at least 1."""
    assert delivery().visibility_delay(delay, now=NOW) == asked


def test_twelve_hours():
    """The 12 hours of visibility count from the receive.

    Extending does not restart SQS's count. A message that was held for an hour has 11 left.
    """
    held_for_an_hour = delivery(received_at=NOW - HOUR)
    assert held_for_an_hour.visibility_delay(43_200, now=NOW) == 43_200 - 3_600 - 60


def test_retention():
    """A message is never hidden past the end of its retention."""
    expiring = delivery(sent_at=NOW - 1000, retention_seconds=1000 + 400)
    assert expiring.visibility_delay(1000, now=NOW) == 100


@given(
    delay=st.floats(min_value=0, allow_nan=False),
    held=st.floats(min_value=-100, max_value=50_000),
    left=st.none() | st.floats(min_value=-1000, max_value=1_209_600),
)
def test_asked_visibility_is_always_legal(delay, held, left):
    """Whatever was drawn, and however late: SQS accepts 1 to 43,200 less what is used up."""
    facts = {} if left is None else {"sent_at": NOW, "retention_seconds": int(left)}
    asked = delivery(received_at=NOW - held, **facts).visibility_delay(delay, now=NOW)
    assert 1 <= asked <= max(1, 43_200 - max(0, held))


def test_facts_of_delivery():
    """A delivery reads its facts from the answer of SQS."""
    sqs_message = {
        "MessageId": "m-1",
        "Attributes": {
            "ApproximateReceiveCount": "3",
            "ApproximateFirstReceiveTimestamp": "1700000000123",
            "SentTimestamp": "1699999999000",
        },
    }
    read = Delivery.from_sqs(sqs_message, queue_url="u", received_at=NOW)
    assert (read.receive_count, read.first_received_at, read.sent_at) == (
        3,
        1_700_000_000.123,
        1_699_999_999.0,
    )


def test_no_attributes():
    """A message without attributes counts as received for the first time."""
    read = Delivery.from_sqs({"MessageId": "m-1"}, queue_url="u", received_at=NOW)
    assert (read.receive_count, read.first_received_at, read.expires_at) == (1, None, None)


# Before a run


def why_not_run(facts, *, retries=1, max_retries=None, retry_for=36 * HOUR, crashes=0):
    return find_reason_before_run(
        delivery(**facts).standing(retries=retries, now=NOW),
        max_retries=max_retries,
        retry_for=retry_for,
        crashes=crashes,
        crash_budget=3,
    )


TOO_MANY_RECEIVES = {"receive_count": 4, "max_receive_count": 3}


@cases(
    "facts budget reason",
    {
        "budget is left": ({}, {}, None),
        "receives are not runs": ({}, {"retries": 9, "max_retries": 3}, None),
        "never started: it runs once": ({}, {"retries": 1, "max_retries": 0}, None),
        "started and lost": ({}, {"crashes": 1, "max_retries": 0}, GiveUpReason.MAX_RETRIES),
        "one retry is left": ({}, {"crashes": 1, "max_retries": 1}, None),
        "time is over": (
            {"first_received_at": NOW - 36 * HOUR},
            {"retries": 3},
            GiveUpReason.RETRY_FOR,
        ),
        "but it never ran": ({"first_received_at": NOW - 36 * HOUR}, {"retries": 0}, None),
        "nobody knows that it ran": ({"first_received_at": NOW - 36 * HOUR}, {"retries": 2}, None),
        "given back by a deploy": ({}, {"retries": 1, "retry_for": 0}, None),
        "it is known to have run": (
            {"first_received_at": NOW - 36 * HOUR},
            {"crashes": 1},
            GiveUpReason.RETRY_FOR,
        ),
        "due for an hour only": (
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - HOUR},
            {},
            None,
        ),
        "the queue's last receive": ({"receive_count": 3, "max_receive_count": 3}, {}, None),
        "one receive too many, but no run": (TOO_MANY_RECEIVES, {}, None),
        "and it crashed": (TOO_MANY_RECEIVES, {"crashes": 1}, GiveUpReason.MAX_RECEIVE_COUNT),
        "two crashes of three": ({}, {"crashes": 2}, None),
        "three crashes": ({}, {"crashes": 3}, GiveUpReason.WORKER_LOST),
    },
)
def test_no_run_without_budget(facts, budget, reason):
    """The worker does not start a run without budget.

    Receives alone never end a message, only runs that are known to have started.
    """
    assert why_not_run(facts, **budget) is reason


@cases(
    "policy budget receives",
    {
        "by time": (Schedule([10]), {"retry_for": 100, "max_retries": None}, 11),
        "by count": (Schedule([10]), {"retry_for": 100, "max_retries": 4}, 5),
        "no retry": (Schedule([10]), {"retry_for": 0, "max_retries": None}, 1),
        "no end": (Schedule([10]), {"retry_for": None, "max_retries": None}, 1000),
        "a second at the least": (Schedule([0]), {"retry_for": 10, "max_retries": None}, 11),
        "growing": (Exponential(base=1, cap=8), {"retry_for": 31, "max_retries": None}, 7),
    },
)
def test_receives_that_a_task_may_need(policy, budget, receives):
    assert receives_needed(policy, **budget, at_most=1_000) == receives


def test_receives_of_a_failing_policy():
    """A worker's start counts receives: it must not end there."""

    class OneDelay(Policy):
        def ceiling(self, attempt):
            return [10.0][attempt - 1]

    budget = {"retry_for": 100, "max_retries": 3, "at_most": 1_000}
    assert receives_needed(OneDelay(), **budget) == 4


@given(
    ceiling=st.floats(min_value=1e-3, max_value=1e6),
    share=st.floats(min_value=0, max_value=1),
    cap=st.floats(min_value=1e-3, max_value=1e6),
)
def test_capped_delay(ceiling, share, cap):
    """A capped delay stays spread under its cap."""
    delay = shrink(ceiling * share, ceiling, cap)
    assert delay == pytest.approx(min(ceiling, cap) * share)


def draw_on_fifo(backoff, attempt):
    options = Options(backoff=backoff, fifo_cap=300)
    return draw_delay(options, message_id="m", attempt=attempt, is_fifo=True, rng=Random(attempt))


def test_receives_under_fifo_cap():
    """The count under a cap uses the delays that a FIFO queue gets."""
    policy = FullJitter(base=2, cap=3600)
    counted = tolerant(policy, cap=300)
    for attempt in (1, 8, 20):
        drawn = draw_on_fifo(policy, attempt)
        assert counted.delay(attempt, Random(attempt)) == drawn <= counted.ceiling(attempt) <= 300


def test_policy_of_timedeltas(caplog):
    """A policy of timedeltas is shrunk like a policy of seconds."""

    class TenMinutes(Policy):
        def ceiling(self, attempt):
            return timedelta(minutes=10)

    assert draw_on_fifo(TenMinutes(), 1) == 300
    assert not caplog.records
