"""How long a message may be retried, and hidden."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.budget import GiveUpReason, longest_delay, spent, wire_delay
from celery_sqs_backoff.delivery import Delivery

NOW = 1_800_000_000.0
HOUR = 3600.0


def delivery(**facts):
    facts.setdefault("received_at", NOW)
    return Delivery(message_id="m", queue_url="https://sqs.example/1/q", **facts)


def why(facts, *, retries=0, max_retries=None, retry_for=36 * HOUR, now=NOW):
    return spent(
        delivery(**facts), retries=retries, max_retries=max_retries, retry_for=retry_for, now=now
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
    assert wire_delay(delay, delivery(), now=NOW) == asked


def test_the_twelve_hours_are_counted_from_the_receive():
    """Extending does not restart SQS's count: a message held for an hour has eleven left."""
    held_for_an_hour = delivery(received_at=NOW - HOUR)
    assert wire_delay(43_200, held_for_an_hour, now=NOW) == 43_200 - 3_600 - 60


def test_a_message_is_never_hidden_past_its_retention():
    expiring = delivery(sent_at=NOW - 1000, retention_seconds=1000 + 400)
    assert longest_delay(expiring, now=NOW) == 100


@given(
    delay=st.floats(min_value=0, allow_nan=False),
    held=st.floats(min_value=-100, max_value=50_000),
    left=st.none() | st.floats(min_value=-1000, max_value=1_209_600),
)
def test_what_is_asked_for_is_always_legal(delay, held, left):
    """Whatever was drawn, and however late: SQS accepts 1 to 43,200 less what is used up."""
    facts = {} if left is None else {"sent_at": NOW, "retention_seconds": int(left)}
    asked = wire_delay(delay, delivery(received_at=NOW - held, **facts), now=NOW)
    assert 1 <= asked <= max(1, 43_200 - max(0, held))


def test_facts_are_read_from_what_sqs_returns():
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
