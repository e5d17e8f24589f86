"""A lease on a message that was received from the fake SQS, and why it is given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.dead_letter import DeadLetterRecord
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease

__all__ = ["lease_on", "some_record"]


def lease_on(
    message: dict[str, Any],
    *,
    queue: Queue,
    calls: Calls,
    keeper: Keeper,
    now: float,
    free: Callable[[], None],
) -> Lease:
    """Make a lease as ``worker.messages.Receiver`` does. ``now``: seconds, of both clocks."""
    return Lease(
        calls=calls,
        queue=queue,
        message=message,
        body=message["Body"],
        delivery=Delivery.from_sqs(
            message,
            queue_url=queue.url,
            received_at=now,
            max_receive_count=queue.max_receive_count,
            retention_seconds=queue.retention_seconds,
            times_given_back=keeper.memory.times_given_back(message["MessageId"]),
        ),
        received_at=now,
        keeper=keeper,
        free=free,
    )


def some_record(failed_at: float, origin: str = "q") -> DeadLetterRecord:
    """Make the record of a message whose failure is not retryable."""
    return DeadLetterRecord(
        task="t",
        id="1",
        reason="not retryable",
        outcome="UNKNOWN",
        attempts=1,
        first_received_at=None,
        failed_at=failed_at,
        origin=origin,
        worker="w",
    )
