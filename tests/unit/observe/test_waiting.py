"""What waits, from the events of one worker."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sqs_backoff.observe.board import QueueNow
from celery_sqs_backoff.observe.events import (
    DeadLettered,
    MessageHidden,
    Polled,
    Recalled,
    SettlementFailed,
)
from celery_sqs_backoff.observe.waiting import Waiting
from tests.support.fake_sqs import Clock


@pytest.fixture
def clock():
    return Clock(1_000.0)


@pytest.fixture
def waiting(clock):
    return Waiting(clock)


def hidden(message_id: str, seconds: float = 60, **facts: Any) -> MessageHidden:
    return MessageHidden(queue="q", message_id=message_id, seconds=seconds, **facts)


def received(*ids: str) -> Polled:
    return Polled(queue="q", message_ids=ids)


OF_TASK: dict[str, Any] = {"queue": "q", "task": "t", "task_id": "i", "message_id": "m"}


@pytest.mark.parametrize(
    "end",
    [
        lambda waiting, clock: waiting(received("m")),
        lambda waiting, clock: waiting(Recalled(queue="q", message_ids=("m",))),
        lambda waiting, clock: waiting(
            DeadLettered(**OF_TASK, reason="revoked", outcome=None, attempt=1)
        ),
        lambda waiting, clock: waiting(
            SettlementFailed(queue="q", message_id="m", action="hide", code="InvalidHandle")
        ),
        lambda waiting, clock: setattr(clock, "now", clock.now + 60),
    ],
    ids=["received", "recalled", "given up", "not hidden in time", "due"],
)
def test_message_stops_waiting(waiting, clock, end):
    """A message stops waiting when its hold ends or fails.

    It ends when the message is received, recalled, given up or due.
    """
    waiting(hidden("m"))
    waiting(hidden("other", 600))
    assert waiting.now("q").waiting == 2
    end(waiting, clock)
    assert waiting.now("q").waiting == 1
    assert waiting.now("another queue") == QueueNow()


def test_hidden_again(waiting, clock):
    """A message that is hidden again counts once, until its last hold is over."""
    waiting(hidden("m", 10))
    waiting(received("m"))
    waiting(hidden("m", 100))
    for waits in (1, 0):
        clock.now += 50
        assert waiting.now("q").waiting == waits


def test_oldest(waiting):
    """The oldest message is told by when it was sent, and by when it was due by its ETA."""
    waiting(hidden("a", sent_at=1_000.0, eta=40_000.0))
    waiting(hidden("b", sent_at=30_000.0, eta=20_000.0))
    waiting(hidden("c"))
    found = waiting.now("q")
    assert (found.oldest_sent_at, found.oldest_due_at) == (1_000.0, 30_000.0)


def test_next_gives_up(waiting):
    """The first message to give up is told, beside those that never do."""
    for message_id, gives_up_at in (("a", 200_000.0), ("b", 100_000.0), ("never", None)):
        waiting(hidden(message_id, gives_up_at=gives_up_at))
    assert waiting.now("q").next_gives_up_at == 100_000


def test_dead_letters(waiting):
    """What was given up is counted by its reason."""
    for reason in ("revoked", "parked", "parked"):
        waiting(DeadLettered(**OF_TASK, reason=reason, outcome=None, attempt=1))
    assert waiting.now("q").dead_letters == {"revoked": 1, "parked": 2}
    assert waiting.queues() == {"q"}


def test_memory(waiting, clock):
    """Messages that are due are forgotten, even if nobody asks for the numbers."""
    for number in range(20):
        waiting(hidden(str(number)))
    clock.now += 60
    waiting(hidden("new"))
    assert sum(map(len, waiting._entries.values())) == 1
