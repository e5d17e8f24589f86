"""What a worker publishes for ``sqs-status``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_sqs_backoff.observe.board import QueueNow
from celery_sqs_backoff.observe.events import MessageHidden
from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.worker.bulletin import know_of


def a_lease(queue: str, sent_at: float) -> Any:
    delivery = SimpleNamespace(sent_at=sent_at)
    return SimpleNamespace(queue=SimpleNamespace(name=queue), delivery=delivery)


def test_know_of() -> None:
    """A worker knows what it holds, runs and hides of the queues that it consumes or has met."""
    waiting = Waiting()
    waiting(MessageHidden(queue="bulk", message_id="m", seconds=60, sent_at=8.0))
    found = know_of(
        waiting,
        running={"mails": 1, "bulk": 0, "new": 0}.__getitem__,
        consumed=["mails", "new"],
        held=[a_lease("mails", 5.0), a_lease("mails", 7.0), a_lease("mails", 6.0)],
    )
    assert found.queues == {
        "mails": QueueNow(running=1, held=2, oldest_sent_at=5.0),
        "bulk": QueueNow(waiting=1, oldest_sent_at=8.0, oldest_due_at=8.0),
        "new": QueueNow(),
    }
