"""Hides messages that this worker cannot turn into a task, instead of deleting them.

Another worker may know the task. During a deploy, workers of the old release do not know new tasks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from celery.utils.log import get_logger

from ..observe.events import UNKNOWN_TASK, DeadLettered
from ..retry.budget import GiveUpReason, shrink
from ..retry.policies import FullJitter
from ..sqs.redact import ErrorText
from ..text import printable
from .lease import Lease

logger = get_logger(__name__)

#: Delay between receives of the same message. The cap is meant to be longer than a deploy takes.
_BACKOFF = FullJitter(base=8, cap=900)

#: The cap on a FIFO queue, where a hidden message blocks its message group.
_FIFO_CAP_SECONDS = 60.0


def keep(lease: Lease, headers: Mapping[str, Any], what: str, *, worker: str) -> None:
    """Hide a message for a while, or make it a dead letter if it cannot come back.

    The message becomes a dead letter at the last receive that its queue allows, and shortly before
    its retention period ends. If the queue has no dead-letter queue, the message is always hidden.

    The worker logs the message when it becomes a dead letter, and at its 1st, 2nd, 4th, 8th receive
    and so on. It does not log each receive, because a sender could fill the log.

    Arguments:
        headers: the message's headers, if they are known.
        what: the fault of the message, for the log and the dead-letter record.
        worker: this worker's name.
    """
    queue, delivery, now = lease.queue, lease.delivery, time.time()
    count, message_id = delivery.receive_count, delivery.message_id
    ends = delivery.standing(retries=0, now=now)
    is_last = (ends.is_last_receive or ends.is_expiring) and queue.dlq_url is not None
    if is_last or count & (count - 1) == 0:
        logger.error(
            "sqs_backoff.not_understood: message %s on %s, receive %d: %s",
            *(message_id, queue.name, count, what),
        )
    if not is_last:
        delay = _BACKOFF.delay(count, random)
        if queue.is_fifo:
            delay = shrink(delay, _BACKOFF.ceiling(count), _FIFO_CAP_SECONDS)
        lease.defer(delivery.visibility_delay(delay, now=now))
        return
    reason, task_id = GiveUpReason.NOT_UNDERSTOOD.value, _text(headers.get("id"))
    is_settled = lease.give_up(
        ErrorText(),
        task=_text(headers.get("task")),
        id=task_id,
        reason=f"{reason}: {what}",
        outcome=None,
        attempts=count,
        worker=worker,
    )
    if is_settled:
        # The event does not name the task, because a sender may invent any number of names, and
        # each would be a label in the metrics. The dead-letter record names it.
        lease.keeper.events.emit(
            DeadLettered(
                queue=queue.name,
                task=UNKNOWN_TASK,
                task_id=task_id or "",
                message_id=message_id,
                reason=reason,
                outcome=None,
                attempt=0,
            )
        )


def _text(value: object) -> str | None:
    return printable(value) if isinstance(value, str) else None
