"""Decides whether a message runs, before Celery makes a request of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.strategy import default as celery_default
from kombu.exceptions import DecodeError

from ..sqs.eta import parse_eta
from .gate import Gate
from .inbox import Arrival
from .lease import Lease
from .messages import Receiver
from .payload import check_headers
from .request import SettledBeforeRun

logger = get_logger(__name__)


def default(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's default strategy, which hands each message on with its lease.

    A message whose budget was used up before this receive is given up by its request.

    Arguments: as for ``celery.worker.strategy.default``.
    """
    handle = celery_default(task, app, consumer, **options)
    receiver = getattr(consumer, "sqs_receiver", None)
    if not isinstance(receiver, Receiver):  # another broker
        return handle  # type: ignore[no-any-return]

    def handle_with_lease(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any
    ) -> Any:
        lease = receiver.lease(message)
        if lease is None:
            return None  # it was lost, or given back, a moment ago: it runs elsewhere
        try:
            headers = message.headers or {}
            gate = receiver.gates.of_call(task, lambda: message.payload)
            message.sqs_gate = gate

            def again() -> None:
                handle_with_lease(message, body, ack, reject, callbacks, **kwargs)

            def start() -> None:
                receiver.deliver(Arrival("", {}, message.delivery_tag, lease, again))

            waits = consumer.task_buckets[task.name] is not None or _is_early(headers)
            message.sqs_waits_in_celery = waits
            asks_now = not waits or (gate is not None and gate.hides_all)
            if not (asks_now and _is_kept_back(gate, lease, headers, task, start)):
                _check_arguments(message.payload)
                if waits:
                    lease.slot_at = None  # the gate is asked again when it is to start
                with suppress(SettledBeforeRun):
                    handle(message, body, ack, reject, callbacks, **kwargs)
        except DecodeError as exc:
            consumer.on_decode_error(message, exc)
        except Exception as exc:  # noqa: BLE001
            # Headers of the wrong type, or a missing id, raise whatever they happen to.
            consumer.on_invalid_task(None, message, exc)
        return None

    return handle_with_lease


def _is_kept_back(
    gate: Gate | None,
    lease: Lease,
    headers: Mapping[str, Any],
    task: Any,
    start: Callable[[], object],
) -> bool:
    """Hide a message whose provider is down, or let it wait for a slot at the provider's rate.

    Celery sees to what has expired or is revoked.
    """
    if gate is None:
        return False
    expires = parse_eta(headers.get("expires"))
    if (expires is not None and expires <= time.time()) or headers.get("id") in state.revoked:
        return False
    options = task.backoff_options
    return gate.hides(lease, options) or gate.waits(lease, options, start)


def is_kept_back_at_start(request: Any, start: Callable[[], object]) -> bool:
    """Ask the provider's gate of a task that Celery has made wait, now that it is to start.

    For its ETA, or for its ``rate_limit``. That it may run, as the gate would have said at its
    receive, is of no use: the provider may be down since, and a slot would have passed.
    """
    message = request.message
    if not getattr(message, "sqs_waits_in_celery", False):
        return False
    return _is_kept_back(message.sqs_gate, request.lease, message.headers, request.task, start)


def _is_early(headers: Mapping[str, Any]) -> bool:
    eta = parse_eta(headers.get("eta"))
    return eta is not None and eta > time.time()


def _check_arguments(payload: Any) -> None:
    """Refuse arguments that would make Celery fail in the pool, before the task's own code.

    There gevent, eventlet and threads report nothing, so the message would be held, and its place
    taken, as long as the worker lives; and a failure that Celery takes for a success is deleted.

    Raises:
        InvalidTaskError: these are not the arguments of a task.
        NotUnderstood: a field of protocol 1 is of the wrong type.
    """
    embed: Any = None
    if isinstance(payload, dict):  # protocol 1, where the body has the fields of the headers
        check_headers(payload)
        args, kwargs = payload.get("args", ()), payload.get("kwargs", {})
    else:
        args, kwargs, embed = payload
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise InvalidTaskError("expected a list of arguments and a dict of keyword arguments")
    if embed is not None and not (isinstance(embed, dict) and all(map(_is_text, embed))):
        raise InvalidTaskError("expected a dict of what the task is embedded in")


def _is_text(value: object) -> bool:
    return isinstance(value, str)
