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
