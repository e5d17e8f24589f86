"""What a worker writes to the store for ``sqs-status``."""

from __future__ import annotations

from celery import Celery

from celery_sqs_backoff.observe.board import QueueNow
from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.worker.bulletin import Bulletin


def a_bulletin(**facts) -> Bulletin:
    """Of a worker that consumes mails, holds no lease, and knows of nothing that waits."""
    return Bulletin(
        Celery("new", set_as_current=False),
        "w",
        waiting=Waiting(),
        consumed=lambda: ["mails"],
        held=tuple,
        **facts,
    )


def test_a_worker_that_has_had_no_message_yet_knows_that_nothing_waits() -> None:
    """Else nobody would know, and nothing would say why."""
    bulletin = a_bulletin(running=lambda queue: 0)
    assert bulletin.now().queues == {"mails": QueueNow()}


def test_messages_of_tasks_without_the_base_class_are_held_by_their_worker() -> None:
    """sqs-status took them for messages of a worker that had crashed."""
    bulletin = a_bulletin(running=lambda queue: 8, unleased=lambda: ["mails"] * 32 + ["bulk"] * 8)
    assert bulletin.now().queues == {
        "mails": QueueNow(running=8, held=24),
        "bulk": QueueNow(running=8),
    }
