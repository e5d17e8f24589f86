"""Guards of how a pool's tasks end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...threads import start_daemon


def is_pool_of(pool: Any, name: str) -> bool:
    """Return whether a pool is one of Celery's by its module's name, or a subclass of it."""
    kind: Any = type(pool)
    return _is_class_of(kind, name)


@cache
def _is_class_of(kind: Any, name: str) -> bool:
    return any(cls.__module__ == f"celery.concurrency.{name}" for cls in kind.__mro__)


def pool_size(pool: Any) -> int:
    """Return how many tasks a pool can run at once.

    Celery 5.5 and 5.6, gevent: ``num_processes`` is the number of greenlets that run now.
    """
    return int(pool.limit if is_pool_of(pool, "gevent") else pool.num_processes)


def remember_running_tasks(consumer: Any) -> None:
    """Prefork: at a lost connection or a stop, do not forget which tasks are running.

    ``AsynPool.flush`` drops jobs from the pool's cache, so nobody hears of their results. All
    versions: those that a process has been sent and has not accepted yet; it runs them, although
    their messages are given back. Celery 5.5: those that run, too (celery#8541); their messages
    would be held as long as the worker lives. And a process whose results nobody reads takes 30
    seconds to end.
    """
    if not is_pool_of(consumer.pool, "prefork"):
        return
    on_close = consumer.on_close

    def on_close_and_remember() -> None:
        pool = consumer.pool._pool  # None: a cold shutdown has ended it already
        jobs = {} if pool is None else pool._cache
        running = {number: job for number, job in jobs.items() if job._accepted or job._write_to}
        on_close()
        jobs.update((number, job) for number, job in running.items() if not job.ready())

    consumer.on_close = consumer.blueprint.on_close = on_close_and_remember  # which a stop calls


def start_nothing_given_back(
    controller: Any,
    may_start: Callable[[Any], bool],
    start: Callable[[Callable[[Any], object], Any], bool],
) -> None:
    """Prefork: of the tasks that wait for a process, start none whose message was given back.

    All versions: between the stop of the consumer and that of the pool, the end of a task starts
    the next one that waits. And if that cannot be started, the error ends the worker.

    Arguments:
        controller: Celery's worker.
        may_start: whether a request's message is still this worker's.
        start: calls its first argument with the second, and contains errors; whether it had none.
    """
    process = controller._process_task

    def process_if_ours(request: Any) -> None:
        if not may_start(request) or not start(process, request):
            controller._quick_release()  # no process will end, and give the place back

    controller._process_task = process_if_ours


def give_back_before_soft_shutdown(consumer: Any, give_back: Callable[[], object]) -> None:
    """Give back what has not begun before a soft shutdown, not after it.

    Celery 5.5 and later: ``worker_soft_shutdown_timeout`` is slept through in the signal handler,
    before any step of the worker is told to stop.
    """
    controller = consumer.controller
    wait = controller.wait_for_soft_shutdown

    def give_back_and_wait() -> None:
        # In a thread: the code that the signal has interrupted may hold a lease's lock.
        start_daemon("sqs-give-back", give_back)
        wait()

    controller.wait_for_soft_shutdown = give_back_and_wait
