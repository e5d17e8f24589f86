"""Keeps messages that this worker cannot turn into a task: they are hidden, never deleted.

A worker of yesterday's release does not know today's tasks, so such a message waits for another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from celery.utils.log import get_logger

from ..observe.events import UNKNOWN_TASK, DeadLettered
from ..retry.budget import GiveUpReason, capped
from ..retry.policies import FullJitter
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.visibility import standing, visibility_delay
from ..text import printable
from .lease import Lease

logger = get_logger(__name__)

#: Delay between receives of the same message. A deploy should not take longer than the cap.
_BACKOFF = FullJitter(base=8, cap=900)

#: The cap on a FIFO queue, where a hidden message blocks its message group.
_FIFO_CAP_SECONDS = 60.0


def keep(lease: Lease, headers: Mapping[str, Any], what: str, *, worker: str) -> None:
    """Hide a message for a while; at its last receive make it a dead letter.

    So it becomes before SQS deletes it, because the queue's retention period is over.
    It is logged at its 1st, 2nd, 4th, 8th ... receive: whoever can send such messages must not be
    able to fill the log.
    """
    count, now = lease.delivery.receive_count, time.time()
    ends = standing(lease.delivery, retries=0, now=now)
    is_last = (ends.is_last_receive or ends.is_expiring) and lease.queue.dlq_url is not None
    if is_last or count & (count - 1) == 0:
        logger.error(
            "sqs_backoff.not_understood: message %s on %s, receive %d: %s",
            lease.delivery.message_id,
            lease.queue.name,
            count,
            what,
        )
    if is_last:
        is_kept = lease.dead_letter(
            DeadLetterRecord(
                task=_text(headers.get("task")),
                id=_text(headers.get("id")),
                reason=f"{GiveUpReason.NOT_UNDERSTOOD.value}: {what}",
                outcome=None,
                attempts=count,
                first_received_at=lease.delivery.first_received_at,
                failed_at=now,
                origin=lease.queue.arn or lease.queue.url,
                worker=worker,
            )
        )
        if is_kept:
            _tell(lease, headers)
        return
    delay = _BACKOFF.delay(count, random)
    if lease.queue.is_fifo:
        delay = capped(delay, _BACKOFF.ceiling(count), _FIFO_CAP_SECONDS)
    lease.defer(visibility_delay(delay, lease.delivery, now=now))


def _tell(lease: Lease, headers: Mapping[str, Any]) -> None:
    """Emit the dead letter. Its task is in the record alone: its sender may name any number."""
    lease.keeper.events.emit(
        DeadLettered(
            queue=lease.queue.name,
            task=UNKNOWN_TASK,
            task_id=_text(headers.get("id")) or "",
            message_id=lease.delivery.message_id,
            reason=GiveUpReason.NOT_UNDERSTOOD.value,
            outcome=None,
            attempt=0,
        )
    )


def _text(value: object) -> str | None:
    return printable(value) if isinstance(value, str) else None
