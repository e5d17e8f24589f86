"""Should this message run? Asked for each one, before a request is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from celery.worker import state
from celery.worker.strategy import default as celery_default

from ..budget import wire_delay
from ..eta import parse_eta
from .lease import Lease
from .messages import held_seconds

__all__ = ["default"]


def default(task: Any, app: Any, consumer: Any) -> Callable[..., Any]:
    """Celery's default strategy, with a lease on each message that comes from SQS.

    A message that this worker was done with but could not delete in time is settled again instead
    of being run again. One that is not due for long goes back to SQS until it is.
    """
    handle = celery_default(task, app, consumer)
    receiver = getattr(consumer, "sqs_receiver", None)
    if receiver is None:  # another broker
        return handle  # type: ignore[no-any-return]

    def handle_with_lease(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any
    ) -> Any:
        lease = receiver.lease(message)
        if lease is not None and (
            receiver.keeper.settle_again(lease) or _defer_until_due(lease, message.headers or {})
        ):
            return None
        return handle(message, body, ack, reject, callbacks, **kwargs)

    return handle_with_lease


def _defer_until_due(lease: Lease, headers: Mapping[str, Any]) -> bool:
    """Give a message back to SQS until its task is due, or a hop on the way there.

    Not if it has expired or is revoked: Celery's strategy sees to that first. Not on the last
    receive that the queue allows: the next one would move the message to the dead-letter queue.
    """
    now = time.time()
    eta, expires = parse_eta(headers.get("eta")), parse_eta(headers.get("expires"))
    if (
        eta is None
        or (expires is not None and expires <= now)
        or headers.get("id") in state.revoked
        or lease.delivery.is_last_before_sqs_moves_it
    ):
        return False
    seconds = wire_delay(eta - now, lease.delivery, now=now)
    return seconds > held_seconds(lease.queue) and lease.defer(seconds)
