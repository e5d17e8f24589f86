"""What waits, from the events of one worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_sqs_backoff.observe import waiting as module
from celery_sqs_backoff.observe.events import (
    DeadLettered,
    Hidden,
    Recalled,
    Received,
    SettlementFailed,
)
from celery_sqs_backoff.observe.waiting import Waiting, WaitingNow
from tests.support.fake_sqs import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000.0)


@pytest.fixture
def waiting(clock: Clock) -> Waiting:
    return Waiting(clock)


def hidden(message_id: str, seconds: float = 60, **facts: float) -> Hidden:
    return Hidden(queue="q", message_id=message_id, seconds=seconds, **facts)


def received(*ids: str) -> Received:
    return Received(queue="q", messages=len(ids), asked_for=10, message_ids=ids)


OF_TASK = {"queue": "q", "task": "t", "task_id": "i", "message_id": "m"}


@pytest.mark.parametrize(
    "end",
    [
        lambda waiting, clock: waiting(received("m")),
        lambda waiting, clock: waiting(Recalled(queue="q", message_ids=("m",))),
        lambda waiting, clock: waiting(
            DeadLettered(**OF_TASK, reason="revoked", outcome=None, attempt=1)
        ),
        lambda waiting, clock: setattr(clock, "now", clock.now + 60),
    ],
    ids=["received", "recalled", "given up", "due"],
)
def test_a_message_stops_waiting(
    waiting: Waiting, clock: Clock, end: Callable[[Waiting, Clock], object]
) -> None:
    waiting(hidden("m"))
    waiting(hidden("other", 600))
    assert waiting.count("q") == 2
    end(waiting, clock)
    assert waiting.count("q") == 1
    assert waiting.count("another queue") == 0


def test_a_message_that_is_hidden_again_waits_once_and_until_then(
    waiting: Waiting, clock: Clock
) -> None:
    waiting(hidden("m", 10))
    waiting(received("m"))
    waiting(hidden("m", 100))
    assert waiting.count("q") == 1
    clock.now += 50
    assert waiting.count("q") == 1, "its first delay is over, its second is not"
    clock.now += 50
    assert waiting.count("q") == 0


def test_the_oldest_and_those_that_give_up_soon(waiting: Waiting) -> None:
    waiting(hidden("a", sent_at=500.0, gives_up_at=9_000.0))
    waiting(hidden("b", sent_at=400.0, gives_up_at=50_000.0))
    waiting(hidden("c"))
    assert waiting.now("q", at=2_000, horizon=7_200) == WaitingNow(
        messages=3,
        oldest_sent_at=400.0,
        oldest_due_at=400.0,
        giving_up=1,
        nearly_given_up=1,
        next_gives_up_at=9_000.0,
    )
    assert waiting.now("empty", at=0, horizon=1) == WaitingNow()


def test_nobody_is_alarmed_by_a_retry_for_that_is_short_and_has_just_begun(
    waiting: Waiting,
) -> None:
    """With an hour of ``retry_for``, each message that waits at all gives up within two hours."""
    waiting(hidden("m", 3_000, sent_at=1_000.0, gives_up_at=4_600.0, retry_for=3_600.0))

    def nearly_given_up(at: float) -> int:
        found = waiting.now("q", at=at, horizon=7_200)
        assert found.giving_up == 1
        return found.nearly_given_up

    assert nearly_given_up(1_100) == 0
    assert nearly_given_up(3_600) == 0
    assert nearly_given_up(3_700) == 1, "a quarter of it is left"


def test_the_last_two_hours_of_a_long_retry_for_are_alarming(waiting: Waiting) -> None:
    waiting(hidden("m", gives_up_at=129_600.0, retry_for=129_600.0))
    assert waiting.now("q", at=120_000, horizon=7_200).nearly_given_up == 0
    assert waiting.now("q", at=123_000, horizon=7_200).nearly_given_up == 1


def test_a_message_is_late_from_its_eta_on(waiting: Waiting) -> None:
    waiting(hidden("m", 3_600, sent_at=1_000.0, eta=40_000.0))
    found = waiting.now("q", at=20_000, horizon=7_200)
    assert (found.oldest_sent_at, found.oldest_due_at) == (1_000.0, 40_000.0)
    waiting(hidden("n", 3_600, sent_at=30_000.0, eta=20_000.0))
    assert waiting.now("q", at=30_000, horizon=7_200).oldest_due_at == 30_000.0


def test_what_is_over_takes_no_memory(waiting: Waiting, clock: Clock) -> None:
    for number in range(5_000):
        waiting(hidden(str(number), 3_600))
        waiting(received(str(number)))
        clock.now += 0.01
    assert waiting.count("q") == 0
    assert len(waiting._due["q"]) <= 1_001


def test_it_remembers_no_more_than_sqs_hides(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 10)
    for number in range(20):
        waiting(hidden(str(number)))
    assert waiting.count("q") == 10


def test_what_sqs_has_not_hidden_in_time_does_not_wait(waiting: Waiting) -> None:
    """It has come back, and another worker may be done with it hours before it would be due."""
    waiting(hidden("m", 3_600))
    waiting(
        SettlementFailed(queue="q", message_id="m", action="hide", code="ReceiptHandleIsInvalid")
    )
    assert waiting.count("q") == 0
