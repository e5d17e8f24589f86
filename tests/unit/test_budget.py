"""The budgets of a message: how often and how long it may be retried, and how long hidden."""

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


def reason_after_run(
    facts, *, retries=0, max_retries=None, retry_for=36 * HOUR, delay=0.0, now=NOW
):
    return find_reason(
        delivery(**facts).standing(retries=retries, now=now),
        max_retries=max_retries,
        retry_for=retry_for,
        delay=delay,
    )


@cases(
    "facts budget reason",
    {
        "nothing is known": ({}, {}, None),
        "no max_retries": ({}, {"retries": 10_000}, None),
        "third retry of three": ({}, {"retries": 2, "max_retries": 3}, None),
        "fourth retry of three": ({}, {"retries": 3, "max_retries": 3}, GiveUpReason.MAX_RETRIES),
        "max_retries=0": ({}, {"max_retries": 0}, GiveUpReason.MAX_RETRIES),
        "a second before 36 h": ({"first_received_at": NOW - 36 * HOUR + 1}, {}, None),
        "36 h are over": ({"first_received_at": NOW - 36 * HOUR}, {}, GiveUpReason.RETRY_FOR),
        "delay a second shorter than retry_for": ({}, {"retry_for": 60, "delay": 59}, None),
        "delay as long as retry_for": (
            {},
            {"retry_for": 60, "delay": 60},
            GiveUpReason.DELAY_TOO_LONG,
        ),
        "delay longer than retry_for": (
            {},
            {"retry_for": 600, "delay": 3600},
            GiveUpReason.DELAY_TOO_LONG,
        ),
        "delay longer than the rest of retry_for": (
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
        "all earlier receives came before the ETA": (
            {"first_received_at": NOW - 50 * HOUR, "deferrals": 4, "receive_count": 5},
            {},
            None,
        ),
        "retry_for=None": ({"first_received_at": NOW - 900 * HOUR}, {"retry_for": None}, None),
        "retry_for=0": ({}, {"retry_for": 0.0}, GiveUpReason.RETRY_FOR),
        "one receive left": ({"receive_count": 4, "max_receive_count": 5}, {}, None),
        "SQS would move it at the next receive": (
            {"receive_count": 5, "max_receive_count": 5},
            {},
            GiveUpReason.MAX_RECEIVE_COUNT,
        ),
        "SQS would delete it in 299 seconds": (
            {"sent_at": NOW - 3600, "retention_seconds": 3600 + 299},
            {},
            GiveUpReason.RETENTION,
        ),
        "SQS would delete it in an hour": (
            {"sent_at": NOW - 3600, "retention_seconds": 7200},
            {},
            None,
        ),
    },
)
def test_first_spent_budget(facts, budget, reason):
    """A worker gives a message up when a budget is spent, and the reason names this budget."""
    assert reason_after_run(facts, **budget) is reason


@pytest.mark.parametrize(
    ("delay", "asked"),
    [(0, 1), (0.001, 1), (1, 1), (1.01, 2), (59.2, 60), (1e9, 43_140), (float("inf"), 43_140)],
)
def test_whole_seconds(delay, asked):
    """The worker asks SQS for a delay in whole seconds, at least 1."""
    assert delivery().visibility_delay(delay, now=NOW) == asked


def test_twelve_hours():
    """SQS can hide a message for at most 12 hours, counted from its receive.

    A call that hides the message longer does not restart the count. After one hour, 11 hours are
    left.
    """
    held_for_an_hour = delivery(received_at=NOW - HOUR)
    assert held_for_an_hour.visibility_delay(43_200, now=NOW) == 43_200 - 3_600 - 60


def test_retention():
    """A hidden message returns at least 300 seconds before its retention ends."""
    expiring = delivery(sent_at=NOW - 1000, retention_seconds=1000 + 400)
    assert expiring.visibility_delay(1000, now=NOW) == 100


@given(
    delay=st.floats(min_value=0, allow_nan=False),
    held=st.floats(min_value=-100, max_value=50_000),
    left=st.none() | st.floats(min_value=-1000, max_value=1_209_600),
)
def test_legal_visibility_timeout(delay, held, left):
    """The worker asks SQS only for a visibility timeout that SQS accepts.

    SQS accepts 1 to 43,200 seconds, less the time since the receive.
    """
    facts = {} if left is None else {"sent_at": NOW, "retention_seconds": int(left)}
    asked = delivery(received_at=NOW - held, **facts).visibility_delay(delay, now=NOW)
    assert 1 <= asked <= max(1, 43_200 - max(0, held))


def test_facts_of_delivery():
    """A ``Delivery`` takes its receive count and its times from SQS's attributes."""
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


# Budgets that are checked before a run


def reason_before_run(facts, *, retries=1, max_retries=None, retry_for=36 * HOUR, crashes=0):
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
        "many receives, no known run": ({}, {"retries": 9, "max_retries": 3}, None),
        "max_retries=0, no known run": ({}, {"retries": 1, "max_retries": 0}, None),
        "max_retries=0, one crash": (
            {},
            {"crashes": 1, "max_retries": 0},
            GiveUpReason.MAX_RETRIES,
        ),
        "max_retries=1, one crash": ({}, {"crashes": 1, "max_retries": 1}, None),
        "36 h are over, three retries": (
            {"first_received_at": NOW - 36 * HOUR},
            {"retries": 3},
            GiveUpReason.RETRY_FOR,
        ),
        "36 h are over, no retry": ({"first_received_at": NOW - 36 * HOUR}, {"retries": 0}, None),
        "36 h are over, two retries": (
            {"first_received_at": NOW - 36 * HOUR},
            {"retries": 2},
            None,
        ),
        "retry_for=0, returned by a worker that stopped": (
            {},
            {"retries": 1, "retry_for": 0},
            None,
        ),
        "36 h are over, one crash": (
            {"first_received_at": NOW - 36 * HOUR},
            {"crashes": 1},
            GiveUpReason.RETRY_FOR,
        ),
        "first received 50 h ago, due for an hour": (
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - HOUR},
            {},
            None,
        ),
        "the queue's last receive": ({"receive_count": 3, "max_receive_count": 3}, {}, None),
        "one receive too many, no known run": (TOO_MANY_RECEIVES, {}, None),
        "one receive too many, one crash": (
            TOO_MANY_RECEIVES,
            {"crashes": 1},
            GiveUpReason.MAX_RECEIVE_COUNT,
        ),
        "two crashes of three": ({}, {"crashes": 2}, None),
        "three crashes": ({}, {"crashes": 3}, GiveUpReason.WORKER_LOST),
    },
)
def test_no_run_without_budget(facts, budget, reason):
    """If a budget is spent when a message arrives, the worker does not start its task.

    A receive alone does not prove a run. A known crash or three receives count as a run.
    """
    assert reason_before_run(facts, **budget) is reason


@cases(
    "policy budget receives",
    {
        "retry_for": (Schedule([10]), {"retry_for": 100, "max_retries": None}, 11),
        "max_retries": (Schedule([10]), {"retry_for": 100, "max_retries": 4}, 5),
        "no retry": (Schedule([10]), {"retry_for": 0, "max_retries": None}, 1),
        "no limit": (Schedule([10]), {"retry_for": None, "max_retries": None}, 1000),
        "delays of 0 count as 1 s": (Schedule([0]), {"retry_for": 10, "max_retries": None}, 11),
        "growing delays": (Exponential(base=1, cap=8), {"retry_for": 31, "max_retries": None}, 7),
    },
)
def test_receives_needed(policy, budget, receives):
    """The number of receives that a message needs follows from its delays and budgets."""
    assert receives_needed(policy, **budget, at_most=1_000) == receives


def test_receives_of_failing_policy():
    """A user's delay policy that raises does not stop the count of receives.

    A worker counts them when it starts, so an error would end the worker.
    """

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
    """A cap scales the random delays down, so that they stay evenly spread."""
    delay = shrink(ceiling * share, ceiling, cap)
    assert delay == pytest.approx(min(ceiling, cap) * share)


def draw_on_fifo(backoff, attempt):
    options = Options(backoff=backoff, fifo_cap=300)
    return draw_delay(options, message_id="m", attempt=attempt, is_fifo=True, rng=Random(attempt))


def test_receives_under_fifo_cap():
    """The count of receives for a FIFO queue uses the delays that its messages get."""
    policy = FullJitter(base=2, cap=3600)
    counted = tolerant(policy, cap=300)
    for attempt in (1, 8, 20):
        drawn = draw_on_fifo(policy, attempt)
        assert counted.delay(attempt, Random(attempt)) == drawn <= counted.ceiling(attempt) <= 300


def test_policy_of_timedeltas(caplog):
    """``fifo_cap`` also limits a policy that returns timedeltas instead of seconds."""

    class TenMinutes(Policy):
        def ceiling(self, attempt):
            return timedelta(minutes=10)

    assert draw_on_fifo(TenMinutes(), 1) == 300
    assert not caplog.records
