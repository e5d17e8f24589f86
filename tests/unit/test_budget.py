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
from celery_sqs_backoff.sqs.visibility import standing, visibility_delay

NOW = 1_800_000_000.0
HOUR = 3600.0


def delivery(**facts):
    facts.setdefault("received_at", NOW)
    return Delivery(message_id="m", queue_url="https://sqs.example/1/q", **facts)


def why(facts, *, retries=0, max_retries=None, retry_for=36 * HOUR, delay=0.0, now=NOW):
    return find_reason(
        standing(delivery(**facts), retries=retries, now=now),
        max_retries=max_retries,
        retry_for=retry_for,
        delay=delay,
    )


@pytest.mark.parametrize(
    ("facts", "budget", "reason"),
    [
        pytest.param({}, {}, None, id="nothing is known: go on"),
        pytest.param({}, {"retries": 10_000}, None, id="no max_retries: the time decides"),
        pytest.param({}, {"retries": 2, "max_retries": 3}, None, id="third retry of three"),
        pytest.param(
            {}, {"retries": 3, "max_retries": 3}, GiveUpReason.MAX_RETRIES, id="fourth of three"
        ),
        pytest.param({}, {"max_retries": 0}, GiveUpReason.MAX_RETRIES, id="0 = never"),
        pytest.param({"first_received_at": NOW - 36 * HOUR + 1}, {}, None, id="a second before"),
        pytest.param(
            {"first_received_at": NOW - 36 * HOUR}, {}, GiveUpReason.RETRY_FOR, id="36 h are over"
        ),
        pytest.param({}, {"retry_for": 60, "delay": 59}, None, id="back a second before"),
        pytest.param(
            {}, {"retry_for": 60, "delay": 60}, GiveUpReason.DELAY_TOO_LONG, id="just too long"
        ),
        pytest.param(
            {}, {"retry_for": 600, "delay": 3600}, GiveUpReason.DELAY_TOO_LONG, id="cannot fit"
        ),
        pytest.param(
            {"first_received_at": NOW - 30},
            {"retry_for": 60, "delay": 30},
            GiveUpReason.RETRY_FOR,
            id="back when it is over",
        ),
        pytest.param(
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - 10, "deferrals": 4},
            {},
            None,
            id="the wait for the ETA does not count",
        ),
        pytest.param(
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - 37 * HOUR},
            {},
            GiveUpReason.RETRY_FOR,
            id="due for 37 hours",
        ),
        pytest.param(
            {"first_received_at": NOW - 50 * HOUR, "deferrals": 4, "receive_count": 5},
            {},
            None,
            id="no earlier receive was a run",
        ),
        pytest.param(
            {"first_received_at": NOW - 900 * HOUR}, {"retry_for": None}, None, id="None = for ever"
        ),
        pytest.param({}, {"retry_for": 0.0}, GiveUpReason.RETRY_FOR, id="0 = no time at all"),
        pytest.param({"receive_count": 4, "max_receive_count": 5}, {}, None, id="one receive left"),
        pytest.param(
            {"receive_count": 5, "max_receive_count": 5},
            {},
            GiveUpReason.MAX_RECEIVE_COUNT,
            id="SQS would move it at the next receive",
        ),
        pytest.param(
            {"sent_at": NOW - 3600, "retention_seconds": 3600 + 299},
            {},
            GiveUpReason.RETENTION,
            id="retention would delete it",
        ),
        pytest.param(
            {"sent_at": NOW - 3600, "retention_seconds": 7200}, {}, None, id="an hour left"
        ),
    ],
)
def test_the_first_budget_that_is_spent_is_named(facts, budget, reason):
    assert why(facts, **budget) is reason


@pytest.mark.parametrize(
    ("delay", "asked"),
    [(0, 1), (0.001, 1), (1, 1), (1.01, 2), (59.2, 60), (1e9, 43_140), (float("inf"), 43_140)],
)
def test_a_delay_is_asked_for_in_whole_seconds_from_one_up(delay, asked):
    assert visibility_delay(delay, delivery(), now=NOW) == asked


def test_the_twelve_hours_are_counted_from_the_receive():
    """Extending does not restart SQS's count: a message held for an hour has eleven left."""
    held_for_an_hour = delivery(received_at=NOW - HOUR)
    assert visibility_delay(43_200, held_for_an_hour, now=NOW) == 43_200 - 3_600 - 60


def test_a_message_is_never_hidden_past_its_retention():
    expiring = delivery(sent_at=NOW - 1000, retention_seconds=1000 + 400)
    assert visibility_delay(1000, expiring, now=NOW) == 100


@given(
    delay=st.floats(min_value=0, allow_nan=False),
    held=st.floats(min_value=-100, max_value=50_000),
    left=st.none() | st.floats(min_value=-1000, max_value=1_209_600),
)
def test_asked_visibility_is_always_legal(delay, held, left):
    """Whatever was drawn, and however late: SQS accepts 1 to 43,200 less what is used up."""
    facts = {} if left is None else {"sent_at": NOW, "retention_seconds": int(left)}
    asked = visibility_delay(delay, delivery(received_at=NOW - held, **facts), now=NOW)
    assert 1 <= asked <= max(1, 43_200 - max(0, held))


def test_facts_are_read_from_the_answer_of_sqs():
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


def test_a_server_that_returns_no_attributes_is_a_first_receive():
    read = Delivery.from_sqs({"MessageId": "m-1"}, queue_url="u", received_at=NOW)
    assert (read.receive_count, read.first_received_at, read.expires_at) == (1, None, None)


# Before a run


def why_not_run(facts, *, retries=1, max_retries=None, retry_for=36 * HOUR, crashes=0):
    return find_reason_before_run(
        standing(delivery(**facts), retries=retries, now=NOW),
        max_retries=max_retries,
        retry_for=retry_for,
        crashes=crashes,
        crash_budget=3,
    )


TOO_MANY_RECEIVES = {"receive_count": 4, "max_receive_count": 3}


@pytest.mark.parametrize(
    ("facts", "budget", "reason"),
    [
        pytest.param({}, {}, None, id="budget is left"),
        pytest.param({}, {"retries": 9, "max_retries": 3}, None, id="receives are not runs"),
        pytest.param({}, {"retries": 1, "max_retries": 0}, None, id="never started: it runs once"),
        pytest.param(
            {}, {"crashes": 1, "max_retries": 0}, GiveUpReason.MAX_RETRIES, id="started and lost"
        ),
        pytest.param({}, {"crashes": 1, "max_retries": 1}, None, id="one retry is left"),
        pytest.param(
            {"first_received_at": NOW - 36 * HOUR},
            {"retries": 3},
            GiveUpReason.RETRY_FOR,
            id="time is over",
        ),
        pytest.param(
            {"first_received_at": NOW - 36 * HOUR}, {"retries": 0}, None, id="but it never ran"
        ),
        pytest.param(
            {"first_received_at": NOW - 36 * HOUR},
            {"retries": 2},
            None,
            id="nobody knows that it ran",
        ),
        pytest.param({}, {"retries": 1, "retry_for": 0}, None, id="given back by a deploy"),
        pytest.param(
            {"first_received_at": NOW - 36 * HOUR},
            {"crashes": 1},
            GiveUpReason.RETRY_FOR,
            id="it is known to have run",
        ),
        pytest.param(
            {"first_received_at": NOW - 50 * HOUR, "due_at": NOW - HOUR},
            {},
            None,
            id="due for an hour only",
        ),
        pytest.param(
            {"receive_count": 3, "max_receive_count": 3}, {}, None, id="the queue's last receive"
        ),
        pytest.param(TOO_MANY_RECEIVES, {}, None, id="one receive too many, but no run"),
        pytest.param(
            TOO_MANY_RECEIVES, {"crashes": 1}, GiveUpReason.MAX_RECEIVE_COUNT, id="and it crashed"
        ),
        pytest.param({}, {"crashes": 2}, None, id="two crashes of three"),
        pytest.param({}, {"crashes": 3}, GiveUpReason.WORKER_LOST, id="three crashes"),
    ],
)
def test_a_run_is_not_started_without_budget(facts, budget, reason):
    """Receives alone end nothing: only runs that are known to have been started do."""
    assert why_not_run(facts, **budget) is reason


@pytest.mark.parametrize(
    ("policy", "budget", "receives"),
    [
        pytest.param(Schedule([10]), {"retry_for": 100, "max_retries": None}, 11, id="by time"),
        pytest.param(Schedule([10]), {"retry_for": 100, "max_retries": 4}, 5, id="by count"),
        pytest.param(Schedule([10]), {"retry_for": 0, "max_retries": None}, 1, id="no retry"),
        pytest.param(Schedule([10]), {"retry_for": None, "max_retries": None}, 1000, id="no end"),
        pytest.param(
            Schedule([0]), {"retry_for": 10, "max_retries": None}, 11, id="a second at the least"
        ),
        pytest.param(
            Exponential(base=1, cap=8), {"retry_for": 31, "max_retries": None}, 7, id="growing"
        ),
    ],
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
def test_a_capped_delay_stays_spread_under_its_cap(ceiling, share, cap):
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


def test_a_policy_of_timedeltas_is_shrunk_like_one_of_seconds(caplog):
    class TenMinutes(Policy):
        def ceiling(self, attempt):
            return timedelta(minutes=10)

    assert draw_on_fifo(TenMinutes(), 1) == 300
    assert not caplog.records
