"""Workarounds for bugs of Celery, and for differences between its versions and pools.

They run in the process that runs a task, with every version of Celery. They do no harm on a version
that does not need them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, getattr_static
from traceback import walk_tb
from typing import Any, Final

import celery.app.task as celery_task
from billiard.process import current_process
from celery import Task, states
from celery.exceptions import SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate
from celery.utils.log import get_task_logger
from kombu.exceptions import EncodeError

from ..text import error_site, printable
from .handover import RUNNING, run_of

logger = get_task_logger(__name__)

#: Hooks that Celery calls after the decision about the message.
_HOOKS: Final = ("on_retry", "on_failure", "on_success", "after_return")

#: Flags of code whose frames can be suspended, such as generators.
_MAY_WAIT: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

#: In a chain of causes, ``free_frames`` clears the frames of at most this many exceptions.
_MAX_CHAIN: Final = 10


# Failures after the run


def contain_backend(backend: Any) -> None:
    """Keep an error of the result backend from becoming the task's failure.

    All versions of Celery take such an error for the task's failure. Celery then calls
    ``on_failure`` and ``link_error``, which may undo the task's work, and stores FAILURE if the
    backend has recovered. If Celery cannot store STARTED, it fails the task without running it.

    The error is still raised if a chord waits for the success, or if the result cannot be encoded.
    """
    if getattr(backend.mark_as_done, "_is_wrapped", False):
        return
    done, retry, store = backend.mark_as_done, backend.mark_as_retry, backend.store_result

    @wraps(done)
    def mark_as_done(
        task_id: str, result: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        run = RUNNING.get()
        if run is None or run.task_id != task_id or run.report is None:
            done(task_id, result, request, *args, **kwargs)
            return
        has_chord = bool(getattr(request, "chord", None))
        run.is_awaited = has_chord  # because Celery has now sent callbacks and the rest of a chain
        try:
            done(task_id, result, request, *args, **kwargs)
        except Exception as exc:
            if has_chord or isinstance(exc, EncodeError):
                raise
            log_failed_later(getattr(request, "task", None), task_id, exc)
        run.is_awaited = False

    @wraps(retry)
    def mark_as_retry(task_id: str, *args: Any, **kwargs: Any) -> None:
        run = RUNNING.get()
        try:
            retry(task_id, *args, **kwargs)
        except Exception as exc:
            if run is None or run.report is None:
                raise
            log_failed_later(getattr(kwargs.get("request"), "task", None), task_id, exc)

    @wraps(store)
    def store_result(task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        run = RUNNING.get()
        try:
            return store(task_id, result, state, *args, **kwargs)
        except SoftTimeLimitExceeded:
            raise  # Celery raises it only once, and it must end the run
        except Exception as exc:
            if state != states.STARTED or run is None or run.has_begun or run.task_id != task_id:
                raise
            task = printable(getattr(kwargs.get("request"), "task", None))
            logger.error(
                "sqs_backoff.start_not_stored: task %s[%s] runs, but its state STARTED is not"
                " stored; %s",
                *(task, printable(task_id), error_site(exc)),
                extra={"task_name": task, "task_id": task_id},
            )

    mark_as_done._is_wrapped = True  # type: ignore[attr-defined]
    backend.mark_as_done, backend.mark_as_retry = mark_as_done, mark_as_retry
    backend.store_result = store_result


def contain_hooks(cls: Any) -> None:
    """Log an error in the task's own hooks, and keep it from changing what happens to the message.

    Celery 5.7 itself catches errors of ``on_success`` and ``after_return``. Other versions catch no
    errors of hooks.
    """
    for name in _HOOKS:
        hook = getattr(cls, name)
        if hook is not getattr(Task, name) and not getattr(hook, "_is_wrapped", False):
            setattr(cls, name, _contain(getattr_static(cls, name)))


def _contain(hook: Any) -> Callable[..., Any]:
    @wraps(hook)
    def call_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook.__get__(self, type(self))(*args, **kwargs)
        except Exception as exc:
            run = run_of(self.request)
            if run is None or run.delivery is None:
                raise  # on another broker, or in the main process, which catches the error itself
            log_failed_later(self.name, run.task_id, exc)

    call_hook._is_wrapped = True  # type: ignore[attr-defined]
    return call_hook


def log_failed_later(task: object, task_id: str, exc: BaseException) -> None:
    """Log the type and the place of an error that occurred after the run.

    The error's text is left out, because it may quote the task's arguments.

    Arguments:
        task: the task's name.
        task_id: the task ID on the message.
    """
    name = printable(task)
    logger.error(
        "sqs_backoff.after_run_failed: task %s[%s]: an error after the run does not change what"
        " happens to the message; %s",
        *(name, printable(task_id), error_site(exc)),
        extra={"task_name": name, "task_id": task_id},
    )


# The log


def log_known_failures_once() -> None:
    """Drop Celery's log lines about failures that the task's rules have classified.

    The main process logs each of these failures in one line. Celery would first log the failure as
    unexpected, with its traceback.
    """
    logging.getLogger("celery.app.trace").addFilter(_is_news)  # logging adds it only once


def _is_news(record: logging.LogRecord) -> bool:
    run, about = RUNNING.get(), getattr(record, "data", None)
    if run is None or not run.is_known or not isinstance(about, dict):
        return True
    return bool(about.get("id") != run.task_id)


# Exceptions that end more than a task


def ends_the_process(exc: BaseException) -> bool:
    """Return whether an exception ends the worker, or a child process of the prefork pool."""
    if isinstance(exc, WorkerShutdown | WorkerTerminate):
        return True
    is_child = current_process()._parent_pid is not None
    return isinstance(exc, SystemExit | KeyboardInterrupt) and is_child


def is_pools_time_limit(exc: BaseException, task: Any, timelimit: Any) -> bool:
    """Return whether gevent's pool raised this exception for the task's hard time limit.

    The exception must reach the pool again, because the pool reports the time limit to the main
    process. A task's own ``gevent.Timeout`` of the same number of seconds looks the same.

    Arguments:
        timelimit: the message's header, a pair of hard and soft limit, or ``None``.
    """
    gevent = sys.modules.get("gevent")
    if gevent is None or not isinstance(exc, gevent.Timeout):
        return False
    limit = (timelimit or (None,))[0] or task.time_limit
    return limit is not None and exc.seconds == limit


def free_frames(exc: BaseException | None) -> None:
    """Free the memory that the ended frames of a failure hold.

    In all versions of Celery the tracer's frame refers to the ``ExceptionInfo``. That refers to the
    exception, and the exception to the frame. Each failure leaves such a cycle of some 150 KB.
    Celery 5.7 clears the frames of the failure, but not the frames of its cause.

    Frames of generators and coroutines are not cleared. A client library may use them again after
    it has passed an error to its caller, and before Python 3.13 clearing would end them.
    """
    for _ in range(_MAX_CHAIN):
        if exc is None:
            return
        for frame, _line in walk_tb(exc.__traceback__):
            if not frame.f_code.co_flags & _MAY_WAIT:
                with suppress(RuntimeError):  # the frame still runs, if a task ran inside another
                    frame.clear()
        exc = exc.__cause__ or exc.__context__


# A message that ends without a run


def store_refusal(task: Any, result: object) -> None:
    """Store a guard's refusal as the task's result, and tell the chord that the task has ended.

    The rest of a chain is not sent. So a chord that waits for a later task of the chain goes on
    waiting, as after any ``Ignore``.

    Raises:
        Exception: the result backend has failed.
    """
    request = task.request
    task.backend.mark_as_done(  # notifies the chord even if no result is stored
        request.id, result, request=request, store_result=not ignores_result(task, request)
    )


def ignores_result(task: Any, request: Any) -> bool:
    """Return whether Celery stores no result for this run."""
    celerys_own = getattr(celery_task, "get_actual_ignore_result", None)  # Celery 5.7 has it
    if celerys_own is not None:
        return bool(celerys_own(task, request))
    return bool(task.ignore_result or request.ignore_result)
