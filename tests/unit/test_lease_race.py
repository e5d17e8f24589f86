"""A lost message that is received again while its run ends."""

from __future__ import annotations

from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.sqs.settlement import Row, Want

QUEUE = Queue("https://sqs.example/1/q")


def row(handle: str) -> Row:
    return Row(QUEUE, "m", handle, 1_000.0)


def test_the_end_of_a_lost_run_counts_once() -> None:
    lost = row("h1")
    lost.become(Want.LOST)
    assert lost.end_lost()
    assert not lost.end_lost()


def test_a_message_that_is_held_again_is_not_lost() -> None:
    lost = row("h1")
    lost.become(Want.LOST)
    lost.hold_again(row("h2"))
    assert not lost.end_lost()
    assert lost.become(Want.DELETE), "its run's end settles it"
