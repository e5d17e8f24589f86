"""Guards of how tasks are handed to the pool, and of how they end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import celery
from celery.worker import state

from ..lease import State

__all__ = ["give_back_before_soft_shutdown", "remember_running_tasks", "run_after_receiving"]


def run_after_receiving(consumer: Any) -> None:
    """On solo and gevent: run a task only when the whole batch it came in has been taken in.

    All versions: there the callback that receives a message does not return before its task has
    ended (solo) or has a greenlet (gevent, whose pool blocks while it is full). So the messages
    behind it in the batch would stay unknown, and unrenewed. (It is so on eventlet, too, which
    Celery advises against; there this guard kept a worker from ending.)
    """
    handle, hub = consumer.on_task_request, consumer.hub
    waiting: deque[Any] = deque()

    running = False

    def run_waiting() -> None:
        nonlocal running
        try:
            while waiting:
                if hub is None:
                    consumer.pool._pool.wait_available()  # gevent: until a greenlet is free
                request = waiting.popleft()
                if not _is_stopping() and _is_ours(request):
                    handle(request)
        finally:
            running = False

    def on_task_request(request: Any) -> None:
        nonlocal running
        waiting.append(request)
        if running:
            return
        running = True
        if hub is None:
            consumer.timer.call_after(0, run_waiting)  # in a greenlet of its own
        else:
            hub.call_soon(run_waiting)

    consumer.on_task_request = on_task_request


def _is_ours(request: Any) -> bool:
    """Whether the request's message is still to be run here."""
    lease = getattr(request, "lease", None)  # other tasks' requests have none
    return lease is None or lease.state is State.HELD


def remember_running_tasks(consumer: Any) -> None:
    """Prefork: at a lost connection, do not forget which tasks are running.

    Celery 5.5: ``AsynPool.flush`` clears the pool's cache of jobs, so nobody hears of the results
    of those that run (celery#8541). Their messages would be held as long as the worker lives.
    """
    if celery.VERSION >= (5, 6) or type(consumer.pool).__module__ != "celery.concurrency.prefork":
        return
    on_close = consumer.on_close

    def on_close_and_remember() -> None:
        jobs = consumer.pool._pool._cache
        running = {number: job for number, job in jobs.items() if job._accepted}
        on_close()
        jobs.update((number, job) for number, job in running.items() if not job.ready())

    consumer.on_close = on_close_and_remember


def give_back_before_soft_shutdown(consumer: Any, give_back: Callable[[], object]) -> None:
    """Give back what has not begun before a soft shutdown, not after it.

    Celery 5.5 and later: ``worker_soft_shutdown_timeout`` is slept through in the signal handler,
    before any step of the worker is told to stop.
    """
    controller = consumer.controller
    wait = controller.wait_for_soft_shutdown

    def give_back_and_wait() -> None:
        # In a thread: the code that the signal has interrupted may hold a lease's lock.
        threading.Thread(target=give_back, daemon=True).start()
        wait()

    controller.wait_for_soft_shutdown = give_back_and_wait


def _is_stopping() -> bool:
    """As Celery tells: an exit code, which may be 0, or True."""
    codes = (state.should_stop, state.should_terminate)
    return any(code is not None and code is not False for code in codes)
