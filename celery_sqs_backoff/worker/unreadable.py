"""Messages that this worker cannot make a task of: they wait, hidden, and are never deleted.

Celery acks (deletes) what it cannot decode, and rejects (kombu 5.7: deletes, where the queue has
no redrive policy) what it does not know, after logging the whole body. A worker of yesterday's
release, though, does not know today's tasks; and the body is the user's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from celery.utils.log import get_logger

from ..budget import GiveUpReason, wire_delay
from ..deadletter import DeadLetterRecord
from ..policies import FullJitter
from .lease import Lease
from .messages import Receiver

__all__ = ["install"]

logger = get_logger(__name__)

#: Between two looks at the same message; a deploy should not take longer than the cap.
_BACKOFF = FullJitter(base=8, cap=900)


def install(consumer: Any, receiver: Receiver) -> None:
    """Replace Celery's four ways to be rid of such a message by one that keeps it."""

    def keep(message: Any, what: str, exc: BaseException | None) -> None:
        headers = message.headers or {}
        if (lease := receiver.lease(message)) is not None:
            receiver.in_turn(lease, lambda: settle(lease, headers, what, exc))

    def settle(
        lease: Lease, headers: Mapping[str, Any], what: str, exc: BaseException | None
    ) -> None:
        logger.error(
            "sqs_backoff.not_understood: message %s on %s, receive %d: %s%s",
            lease.delivery.message_id,
            lease.queue.name,
            lease.delivery.receive_count,
            what,
            f" ({type(exc).__name__})" if exc else "",
        )
        if lease.delivery.is_last_before_sqs_moves_it and lease.queue.dlq_url:
            lease.dead_letter(
                DeadLetterRecord(
                    task=_text(headers.get("task")),
                    id=_text(headers.get("id")),
                    reason=f"{GiveUpReason.NOT_UNDERSTOOD.value}: {what}",
                    outcome=None,
                    attempts=lease.delivery.receive_count,
                    first_received_at=lease.delivery.first_received_at,
                    failed_at=time.time(),
                    origin=lease.queue.arn or lease.queue.url,
                    worker=consumer.hostname,
                )
            )
            return
        delay = _BACKOFF.delay(lease.delivery.receive_count, random)
        lease.defer(wire_delay(delay, lease.delivery, now=time.time()))

    consumer.on_unknown_message = lambda body, message: keep(
        message, "it is no Celery message", None
    )
    consumer.on_unknown_task = lambda body, message, exc: keep(
        message, f"task {(message.headers or {}).get('task')!r} is not registered here", None
    )
    consumer.on_invalid_task = lambda body, message, exc: keep(
        message, "its headers or its content type are not those of a task", exc
    )
    consumer.on_decode_error = lambda message, exc: keep(message, "its body does not decode", exc)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
