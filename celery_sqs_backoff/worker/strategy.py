"""Should this message run? Asked for each one, before a request is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery.worker import state
from celery.worker.strategy import default as celery_default
from kombu.exceptions import DecodeError

from ..budget import wire_delay
from ..eta import parse_eta
from .lease import Lease
from .messages import held_seconds
from .request import SettledBeforeRun

__all__ = ["default"]


def default(task: Any, app: Any, consumer: Any) -> Callable[..., Any]:
    """Celery's default strategy, with a lease on each message that comes from SQS.

    A message that this worker is running, or was done with but could not delete in time, is not
    run again. One that is not due for long goes back to SQS until it is. One whose budget was used
    up before this receive is given up by its request.
    """
    handle = celery_default(task, app, consumer)
    receiver = getattr(consumer, "sqs_receiver", None)
    if receiver is None:  # another broker
        return handle  # type: ignore[no-any-return]

    def handle_with_lease(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any
    ) -> Any:
        def start() -> None:
            if lease is None or not _defer_until_due(lease, message.headers or {}):
                with suppress(SettledBeforeRun):
                    handle(message, body, ack, reject, callbacks, **kwargs)

        lease = receiver.lease(message)
        if lease is None:
            start()
        elif not receiver.keeper.recognise(lease):
            receiver.in_turn(lease, lambda: _contained(start, consumer, message))

    return handle_with_lease


def _contained(start: Callable[[], None], consumer: Any, message: Any) -> None:
    """Start a task; what is wrong with its message goes where Celery's consumer sends it.

    Celery sends there only what it thought of. Headers of the wrong type, or a missing id, raise
    whatever they happen to, and would end one worker after the other.
    """
    try:
        start()
    except DecodeError as exc:
        consumer.on_decode_error(message, exc)
    except Exception as exc:  # noqa: BLE001
        consumer.on_invalid_task(None, message, exc)


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
