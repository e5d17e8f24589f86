"""Celery's default strategy, behind our admission."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.worker.strategy import default as celery_default
from kombu.exceptions import DecodeError

from .admission import Answer
from .payload import check_call
from .receive import Receiver
from .request import SettledBeforeRun


def default(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return Celery's default strategy, for messages that are admitted.

    Arguments: as for ``celery.worker.strategy.default``.
    """
    handle = celery_default(task, app, consumer, **options)
    receiver = getattr(consumer, "sqs_receiver", None)
    if not isinstance(receiver, Receiver):  # another broker
        return handle  # type: ignore[no-any-return]

    def admit(message: Any, *args: Any, **kwargs: Any) -> None:
        arrival = receiver.arrival(message.delivery_tag)
        if arrival is None:
            return  # it was lost, or given back, a moment ago: it runs elsewhere
        message.sqs_arrival = arrival
        try:
            is_limited = consumer.task_buckets[task.name] is not None
            arrival.waits_in_celery = waits = is_limited or arrival.is_early
            arrival.gate = gate = receiver.gates.of_call(task, lambda: message.payload)
            is_unknown, arrival.options = arrival.options is None, task.backoff_options
            if gate is not None or is_unknown:  # else it was admitted when it was received
                arrival.go_on = lambda: admit(message, *args, **kwargs)
                if receiver.admission.admit(arrival, starts=not waits) is Answer.KEEP_BACK:
                    return
            check_call(message.payload)
            with suppress(SettledBeforeRun):
                handle(message, *args, **kwargs)
        except DecodeError as exc:
            consumer.on_decode_error(message, exc)
        except Exception as exc:  # noqa: BLE001
            # Headers of the wrong type, or a missing id, raise whatever they happen to.
            consumer.on_invalid_task(None, message, exc)

    return admit
