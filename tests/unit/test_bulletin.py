"""What a worker writes to the store for ``sqs-status``."""

from __future__ import annotations

from celery import Celery

from celery_sqs_backoff.observe.board import QueueNow
from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.worker.bulletin import Bulletin


def test_a_worker_that_has_had_no_message_yet_knows_that_nothing_waits() -> None:
    """Else nobody would know, and nothing would say why."""
    bulletin = Bulletin(
        Celery("new", set_as_current=False),
        "w",
        waiting=Waiting(),
        running=lambda queue: 0,
        consumed=lambda: ["mails"],
        held=tuple,
    )
    assert bulletin.now().queues == {"mails": QueueNow()}
