"""Replaces parts of Celery's consumer and kombu's channel, so that no bad message is deleted.

A bad message is a message that Celery cannot turn into a task. If Celery cannot decode a message,
Celery acks the message, and kombu deletes it. If Celery does not know the task, Celery rejects the
message. kombu 5.7 deletes a rejected message if the queue has no redrive policy. So messages are
lost during a deploy, because a worker of the old release does not know the new tasks. Celery also
logs the whole body of a bad message, with the user's data.

The new parts also check whether a message may run. They settle each message (for example delete or
hide it) through its lease. A lease (:class:`.Lease`) is one received message that the worker holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery.worker import state
from celery.worker.request import Request
from celery.worker.strategy import default as celery_default
from kombu.utils.imports import symbol_by_name

from ..text import printable
from . import unreadable, upstream
from .lease import Lease, State
from .payload import check_call
from .receive import Receiver
from .request import (
    BackoffRequest,
    SettledBeforeRun,
    begin_here,
    forget,
    may_begin,
    was_handed_to_pool,
)


def install(consumer: Any, receiver: Receiver) -> None:
    """Replace Celery's handlers of bad messages, and its call that hands a task to the pool.

    Call this once per worker.
    """
    _keep_bad_messages(consumer, receiver)
    _admit_at_start(consumer, receiver)


def _keep_bad_messages(consumer: Any, receiver: Receiver) -> None:
    """Replace Celery's four handlers of bad messages, because they delete the messages."""

    def keep(message: Any, what: str, exc: BaseException | None = None) -> None:
        lease = receiver.window.lease(message.delivery_tag)
        if lease is not None:  # else the worker has just lost the message, or given it back to SQS
            what = what if exc is None else f"{what} ({type(exc).__name__})"
            unreadable.keep(lease, message.headers or {}, what, worker=consumer.hostname)

    def unknown_task(body: Any, message: Any, exc: BaseException) -> None:
        name = printable((message.headers or {}).get("task"))
        keep(message, f"task {name} is not registered here")

    consumer.on_unknown_message = lambda body, message: keep(message, "it is not a Celery message")
    consumer.on_unknown_task = unknown_task
    consumer.on_invalid_task = lambda body, message, exc: keep(
        message, "its headers or its content type do not describe a task", exc
    )
    consumer.on_decode_error = lambda message, exc: keep(message, "its body cannot be decoded", exc)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return Celery's strategy for a task, with our check of each message (``Admission.admit``).

    Celery calls the strategy with each message of the task. On another broker than SQS there is no
    check.

    Arguments: as for ``celery.worker.strategy.default``.
    """
    receiver = getattr(consumer, "sqs_receiver", None)
    if not isinstance(receiver, Receiver):
        return _strategy_of_another_broker(task, app, consumer, **options)
    handle = celery_default(task, app, consumer, **options)
    has_provider = task.backoff_options.provider is not None

    def admit(message: Any, *args: Any, **kwargs: Any) -> None:
        lease = receiver.window.lease(message.delivery_tag)
        if lease is None:
            return  # the worker has just lost the message, or given it back
        message.sqs_lease = lease
        is_limited, eta = consumer.task_buckets[task.name] is not None, lease.delivery.due_at
        lease.waits_in_celery = waits = is_limited or (eta is not None and eta > time.time())
        if has_provider:
            lease.gate = receiver.gates.of_call(task, lambda: message.payload)
        is_unknown, lease.options = lease.options is None, task.backoff_options
        if has_provider or is_unknown:  # else the check when the message was received is enough
            lease.go_on = partial(admit, message, *args, **kwargs)
            if not receiver.admission.admit(lease, starts=not waits):
                return
        check_call(message.payload)
        with suppress(SettledBeforeRun):
            handle(message, *args, **kwargs)

    return admit


def _strategy_of_another_broker(task: Any, *args: Any, **options: Any) -> Callable[..., Any]:
    """Return Celery's strategy with Celery's own request class, because ours needs a lease."""
    given = task.Request
    if issubclass(symbol_by_name(given), BackoffRequest):
        task.Request = Request
    try:
        return celery_default(task, *args, **options)  # type: ignore[no-any-return]
    finally:
        task.Request = given


def _admit_at_start(consumer: Any, receiver: Receiver) -> None:
    """Let the worker check each message once more just before Celery hands its task to the pool.

    The worker must still hold the message. A message that has waited in Celery, for its ETA or a
    rate limit, must also pass ``Admission.admit`` again.
    """
    hand_to_pool: Callable[[Any], object] = consumer.on_task_request

    def refuse(request: Any, exc: Exception) -> None:
        """Hide a message because the pool cannot take its task.

        At the last receive that its queue allows, send it to the dead-letter queue instead. If the
        message is already settled or lost, or its task may be running, raise the pool's error
        again.
        """
        lease = request.lease
        if lease.state is not State.HELD or lease.handed_to_pool():
            raise exc
        what = f"the pool cannot take it ({type(exc).__name__})"
        headers = {"task": request.name, "id": request.id}
        unreadable.keep(lease, headers, what, worker=consumer.hostname)
        forget(request)

    def on_task_request(request: Any) -> None:
        lease = receiver.window.lease(request.message.delivery_tag)
        if lease is None:
            forget(request)  # the worker has just lost the message, or given it back
            return
        if not isinstance(request, BackoffRequest):
            _settle_plain(request, lease, receiver)
        if lease.waits_in_celery:
            lease.go_on = partial(on_task_request, request)
            if not receiver.admission.admit(lease, starts=True):
                # Let Celery forget the request, even if its message only waits for its provider.
                # After that wait, ``go_on`` calls this function again, which reserves the request
                # again.
                forget(request)
                return
            if lease.refused is not None:
                request.refuse()
                return
            state.task_reserved(request)
        elif not lease.may_start():
            forget(request)
            return
        if not upstream.is_pool_of(consumer.pool, "prefork"):
            request.on_accepted = partial(begin_here, request)
        receiver.window.started(lease)
        try:
            hand_to_pool(request)
        except SettledBeforeRun:
            pass  # the pool solo runs tasks in ``hand_to_pool``, and this one must not begin
        except Exception as exc:  # noqa: BLE001
            refuse(request, exc)

    consumer.on_task_request = on_task_request
    upstream.start_nothing_given_back(consumer.controller, may_begin, refuse)


# Acks and rejects


def settle_by_leases(channel: Any, receiver: Receiver) -> None:
    """Let kombu's channel settle a message through its lease when Celery acks or rejects it."""

    def basic_ack(delivery_tag: str, multiple: bool = False) -> None:
        if (lease := receiver.window.lease(delivery_tag)) is not None:
            lease.done()

    def basic_reject(delivery_tag: str, requeue: bool = False) -> None:
        if (lease := receiver.window.lease(delivery_tag)) is not None:
            _reject(lease, channel, requeue)

    channel.basic_ack = basic_ack
    channel.basic_reject = basic_reject


def _reject(lease: Lease, channel: Any, requeue: bool) -> None:
    """Settle a message that a plain Celery task rejects, as kombu 5.7 does.

    With ``requeue``, SQS shows the message again after the length of a long poll. Without
    ``requeue``, the worker deletes the message if its queue has no dead-letter queue. If its queue
    has a dead-letter queue, SQS shows the message again after a visibility timeout, and moves it to
    the dead-letter queue after ``maxReceiveCount`` receives. Until the queue's attributes are read,
    the worker assumes that there is a dead-letter queue.
    """
    if requeue:
        lease.defer(channel.wait_time_seconds)
    elif lease.queue.dlq_url is None and lease.queue.is_read:
        lease.done()
    else:
        lease.defer(lease.queue.visibility_timeout_seconds)


def _settle_plain(request: Any, lease: Lease, receiver: Receiver) -> None:
    """Let the request of a plain Celery task settle its message, even after the worker lost it.

    The window (the worker's list of held messages) forgets a lost message, so kombu's ack would not
    find its lease. So give the lease to the request.
    """
    free, one_at_a_time = lease.free, receiver.inbox.one_at_a_time

    def ends_with(report: Callable[..., Any]) -> Callable[..., None]:
        def on_end(*args: Any, **kwargs: Any) -> None:
            # Celery does not ack or reject the message after a MemoryError, or after Celery has
            # cancelled the run at a lost connection
            # (worker_cancel_long_running_tasks_on_connection_loss). So let SQS show the message
            # again. This has no effect if the message is already settled.
            try:
                report(*args, **kwargs)
            finally:
                lease.release()
                free()

        return on_end

    def ack(*_: Any) -> None:
        # By default, Celery acks a task when the task begins. With gevent and eventlet, the task
        # occupies its greenlet until its run ends. So let the end of the run, and not this ack,
        # free the place in the window.
        if one_at_a_time and request.time_start is not None:
            lease.free = lambda: None
        lease.done()

    for name in ("on_failure", *(("on_success", "on_timeout") if one_at_a_time else ())):
        setattr(request, name, ends_with(getattr(request, name)))
    request.lease = lease
    lease.handed_to_pool = partial(was_handed_to_pool, request)
    channel = receiver.inbox.channel
    request._on_ack = ack
    request._on_reject = lambda logger, errors, requeue: _reject(lease, channel, requeue)
