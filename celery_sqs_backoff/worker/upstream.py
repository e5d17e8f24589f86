"""Guards against bugs of Celery and kombu that stop a worker on SQS, one guard for each bug.

A guard patches the worker's own objects, not classes. Its docstring names the versions with the
bug. On other versions it does no harm.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from ..threads import start_daemon

# The event loop


def wake_event_loop(hub: Any) -> Callable[[], None]:
    """Let ``hub.call_soon`` wake the event loop while it waits for events.

    Without this, a callback waits until another event wakes the loop. kombu 5.5 and 5.6 never wake
    the loop for a callback. kombu 5.7 wakes it only if another thread calls ``call_soon``. If a
    callback or a timer of the loop itself calls ``call_soon``, the new callback runs only after the
    loop has waited for events. The reason is that ``Hub.create_loop`` collects new callbacks before
    it runs callbacks and timers.

    Celery resets the loop at each reconnect. Call this again after each reconnect.

    Returns:
        A function that wakes the loop and takes no lock, so signal handlers may call it. They must
        not call ``call_soon``, which takes a lock that the interrupted code may hold.
    """
    loop_end, thread_end = socket.socketpair()
    loop_end.setblocking(False)
    thread_end.setblocking(False)
    call_soon = type(hub).call_soon

    def wake() -> None:
        with suppress(OSError):  # the socket is closed, or it is full and the loop wakes up anyway
            thread_end.send(b"x")

    def call_soon_and_wake(*args: Any) -> Any:
        promise = call_soon(hub, *args)
        wake()
        return promise

    def sleep_again() -> None:
        with suppress(OSError):
            if not loop_end.recv(4096):  # the other end is closed: wake_event_loop() ran again
                hub.remove_reader(loop_end)

    hub.add_reader(loop_end, sleep_again)
    hub.call_soon = call_soon_and_wake
    return wake


# Receives: our pollers ask SQS for messages, and kombu only delivers them


def declare_without_asking(consumer: Any) -> None:
    """Let a worker start even if it has no permission to read the attributes of its queues.

    When kombu declares a queue, it asks for the queue's length (``Channel._size``) and ignores the
    answer. If SQS refuses the call (AccessDenied), the worker ends. The call also costs one more
    client for each predefined queue. This is so in all versions of kombu.
    """
    connect = consumer.connect

    def connect_and_guard() -> Any:
        connection = connect()
        connection.default_channel._size = lambda queue: 0
        return connection

    consumer.connect = connect_and_guard


def receive_ourselves(
    channel: Any,
    *,
    on_consume: Callable[[str], object],
    on_cancel: Callable[[str], object],
    drain_events: Callable[[], object],
) -> None:
    """Keep kombu from polling, and report which queues Celery consumes.

    kombu's polling has these bugs:

    - All versions: a 4xx (expired credentials, kombu#2031) raises a bare ``Exception`` in the event
      loop and ends the worker.
    - All versions: the long polls of quiet queues occupy kombu's ten connections, and other queues
      wait.
    - kombu 5.7.0: a 5xx or a timeout ends the worker, too. After a lost connection kombu finds no
      event loop and stops polling (kombu#2404).
    - kombu 5.5: the HTTP client blocks the event loop (kombu#2258), and a body that is no JSON ends
      the worker (kombu#2421).

    Arguments:
        channel: kombu's channel, before it consumes.
        on_consume: called with the name of each queue that Celery starts to consume.
        on_cancel: called with the name of each queue that Celery stops consuming.
        drain_events: replaces the channel's ``drain_events``. Celery calls it if Celery has no
            event loop.
    """
    consume, cancel = channel.basic_consume, channel.basic_cancel

    def basic_consume(queue: str, no_ack: bool = False, *args: Any, **kwargs: Any) -> Any:
        # kombu keeps each message that needs an acknowledgement. When the channel closes, kombu
        # lets SQS show these messages again, even if their tasks are running. So consume without
        # acknowledgements. The worker's leases hold the messages instead.
        result = consume(queue, True, *args, **kwargs)
        # Undo kombu's note that the queue needs no acknowledgements. With this note, another
        # channel of the process would delete the queue's messages when it polls.
        getattr(channel, "_noack_queues", set()).discard(queue)
        on_consume(queue)
        return result

    def basic_cancel(consumer_tag: str) -> Any:
        queue = channel._tag_to_queue.get(consumer_tag)
        result = cancel(consumer_tag)
        if queue is not None:
            on_cancel(queue)
        return result

    channel.basic_consume = basic_consume
    channel.basic_cancel = basic_cancel
    channel._schedule_queue = lambda queue: None
    channel.drain_events = lambda *args, **kwargs: drain_events()


# How a pool's tasks end


def is_pool_of(pool: Any, name: str) -> bool:
    """Return whether a pool is of the class in ``celery.concurrency.<name>``, or a subclass."""
    kind: Any = type(pool)
    return _is_class_of(kind, name)


@cache
def _is_class_of(kind: Any, name: str) -> bool:
    return any(cls.__module__ == f"celery.concurrency.{name}" for cls in kind.__mro__)


def pool_size(pool: Any) -> int:
    """Return how many tasks a pool can run at a time.

    With gevent, use the pool's limit, because ``num_processes`` of Celery 5.5 and 5.6 is the number
    of running greenlets.
    """
    return int(pool.limit if is_pool_of(pool, "gevent") else pool.num_processes)


def remember_running_tasks(consumer: Any) -> None:
    """Let prefork remember its running tasks at a lost connection or a stop.

    ``AsynPool.flush`` drops tasks from the pool's cache, so Celery never sees their results. In all
    versions it drops tasks that were sent to a process but not accepted yet. These tasks run
    although the worker gives their messages back to SQS. Celery 5.5 drops running tasks, too
    (celery#8541), so the worker would hold their messages for ever. Also, the process of a dropped
    task takes 30 seconds to end, because Celery does not read its result.
    """
    if not is_pool_of(consumer.pool, "prefork"):
        return
    on_close = consumer.on_close

    def on_close_and_remember() -> None:
        pool = consumer.pool._pool  # None: a cold shutdown has ended the pool already
        jobs = {} if pool is None else pool._cache
        running = {number: job for number, job in jobs.items() if job._accepted or job._write_to}
        on_close()
        jobs.update((number, job) for number, job in running.items() if not job.ready())

    # At a lost connection, Celery calls the consumer's ``on_close``. At a stop, it calls the
    # blueprint's ``on_close``.
    consumer.on_close = consumer.blueprint.on_close = on_close_and_remember


def start_nothing_given_back(
    controller: Any,
    may_begin: Callable[[Any], bool],
    refuse: Callable[[Any, Exception], object],
) -> None:
    """Keep prefork from starting a waiting task after its message was given back.

    All versions: after the consumer has stopped and before the pool stops, each task that ends lets
    the next waiting task start. If that task cannot be started, the error ends the worker.

    Arguments:
        controller: Celery's worker.
        may_begin: returns whether the task of a request may begin now.
        refuse: called with a request that the pool cannot take, and the error.
    """
    process = controller._process_task

    def process_if_ours(request: Any) -> None:
        try:
            if may_begin(request):
                process(request)
                return
        except Exception as exc:  # noqa: BLE001
            refuse(request, exc)
        controller._quick_release()  # the task does not run, so release its place in the pool

    controller._process_task = process_if_ours


def give_back_before_soft_shutdown(consumer: Any, give_back: Callable[[], object]) -> None:
    """Call ``give_back`` when a soft shutdown begins, not when it ends.

    ``give_back`` gives back to SQS the messages of tasks that have not begun. Celery 5.5 and later
    first sleep for ``worker_soft_shutdown_timeout`` in the signal handler. Only after that, Celery
    stops the worker's steps, which also give messages back.
    """
    controller = consumer.controller
    wait = controller.wait_for_soft_shutdown

    def give_back_and_wait() -> None:
        # Use a thread, because the code that the signal has interrupted may hold a lock that
        # ``give_back`` needs.
        start_daemon("sqs-give-back", give_back)
        wait()

    controller.wait_for_soft_shutdown = give_back_and_wait
