"""What is wrapped around a task when it is bound: its start, its run, its tracer and its hooks.

The run is where a failure is judged. The tracer is the outermost code in the process that runs the
task: it hands over what ``run`` has said, whatever failed after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, getattr_static
from typing import Any, Final

from billiard.einfo import ExceptionInfo
from celery import Task, states
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate, WorkerLostError
from celery.utils.threads import LocalStack
from kombu.utils.encoding import safe_repr

from ..retry.budget import GiveUpReason
from ..retry.decision import End, Ended, GiveUp, RetryIn
from ..retry.outcomes import Outcome
from ..sqs.delivery import Delivery
from ..sqs.redact import ErrorText
from .failed_run import Aborted
from .handover import (
    DELIVERY_KEY,
    RUNNING,
    BackoffRetry,
    Report,
    Run,
    attach_report,
    describe,
    ended_by,
    run_of,
)
from .judging import RETURNED, wrap_call, wrap_run
from .leaving import ends_the_process, is_pools_time_limit
from .starting import member_of, prepare_start
from .storing import keep_ends, log_failed_later

#: Celery's hooks that run after the task's end has been decided.
_HOOKS: Final = ("on_retry", "on_failure", "on_success", "after_return")

#: Characters of a failure's text and traceback that go through the pool's pipe, for Celery's
#: events. (The result backend has stored the whole by then, in the process that ran the task.)
_MAX_REPR_CHARACTERS: Final = 1_000
_MAX_TRACEBACK_CHARACTERS: Final = 6_000

#: Code whose frames can be suspended.
_MAY_WAIT: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

#: Exceptions that are looked at, of those that one was raised in the handling of.
_MAX_CHAIN: Final = 10


class FailedInPool(Exception):
    """Stands in the main process for what a task raised; its ``repr`` is that of the original."""

    def __repr__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


def wrap_task(cls: Any) -> None:
    """Wrap the start, the ``run`` and the hooks of a task, once; let it have its own requests."""
    if "request_stack" not in vars(cls):  # Celery lets it share that of a task it inherits from
        cls.request_stack = LocalStack()
    prepare_start(cls)
    wrap_run(cls)
    wrap_call(cls)
    _contain_hooks(cls)


def _contain_hooks(cls: Any) -> None:
    """Keep what the task's own hooks raise from changing what has been decided; it is logged."""
    for name in _HOOKS:
        hook = getattr(cls, name)
        if hook is not getattr(Task, name) and not getattr(hook, "_is_wrapped", False):
            setattr(cls, name, _contained(getattr_static(cls, name)))


def _contained(hook: Any) -> Callable[..., Any]:
    @wraps(hook)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return member_of(self, hook)(*args, **kwargs)
        except Exception as exc:
            run = run_of(self.request)
            if run is None:  # another broker, or the main process, which contains it too
                raise
            log_failed_later(self.name, run.task_id, exc)

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    return wrapped


def wrap_trace(task: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function by which Celery runs a task, stores its result and calls its hooks."""

    def traced(task_id: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        delivery = request.pop(DELIVERY_KEY, None) if request else None
        if not isinstance(delivery, Delivery):  # another broker
            return trace(task_id, args, kwargs, request)
        run = Run(task_id, delivery)
        # Now: Celery before 5.7 takes the next task off its list before it sends it.
        run.is_followed = bool(request.get("callbacks") or request.get("chain"))
        token = RUNNING.set(run)
        try:
            keep_ends(task.backend)  # each thread has its own
            result = trace(task_id, args, kwargs, request)
        except BaseException as exc:
            is_over = run.report is not None  # and the time limit has come too late to say more
            limits = request.get("timelimit")
            if ends_the_process(exc) or (not is_over and is_pools_time_limit(exc, task, limits)):
                raise
            return _result_of_escaped(task, run, request, exc)
        finally:
            RUNNING.reset(token)
        if result.info is None:
            return result
        # Rebound: this frame is the caller of the failure's frames, and must not hold the failure.
        result = _handed_over(task, run, request, result)
        return result

    return traced


def _result_of_escaped(task: Any, run: Run, request: Any, exc: BaseException) -> Any:
    """What Celery's tracer would have returned, had the exception not got out of it."""
    from celery.app.trace import TraceInfo, trace_ok_t  # brings the worker along

    report = run.report
    if report is None:
        # Before the run nothing was processed: it is tried again, within the budgets.
        end = End.RAISED if run.has_begun else End.NOT_BEGUN
        end = end if isinstance(exc, Exception) else End.ABORTED
        report = Report(Ended(end), _error_of(task, exc))
    if report.ended.end is End.RETURNED:
        report = _returned_but(task, run, request, exc)
        if report.ended.word is None:
            return trace_ok_t(None, None, 0.0, None)
    elif report.ended.end is End.ABORTED:
        exc = WorkerLostError(f"The run was aborted: {report.error.exception_type}")
    else:
        log_failed_later(task.name, run.task_id, exc)
    info = _small(exc, report, traceback=report.error.traceback or "", internal=True)
    return trace_ok_t(info, TraceInfo(states.FAILURE, exc), 0.0, None)


def _handed_over(task: Any, run: Run, request: Any, result: Any) -> Any:
    """The tracer's result with a small ``ExceptionInfo``, and the report on it."""
    from celery.app.trace import TraceInfo  # brings the worker along

    exc, report = result.info.retval, run.report
    if isinstance(exc, TaskPredicate) and not _is_from(report, exc):
        report = Report(ended_by(exc), report.error if report else ErrorText())
    elif report is None or (report.ended.end is End.ABORTED and not _is_abort(exc)):
        report = Report(Ended(End.RAISED), _error_of(task, exc))
    elif report.ended.end is End.RETURNED:
        report = _returned_but(task, run, request, exc)
    retval = result.retval
    small = _small(exc, report, traceback=retval.traceback or "", internal=retval.internal)
    _release_frames(exc)
    return result._replace(retval=small, info=TraceInfo(result.info.state))


def _returned_but(task: Any, run: Run, request: Any, exc: BaseException) -> Report:
    """Say what becomes of a run that returned, although something failed after it."""
    log_failed_later(task.name, run.task_id, exc)
    reason = _undelivered_work(run, request, exc)
    if reason is None:
        return RETURNED
    return Report(Ended(End.RETURNED, GiveUp(reason, Outcome.UNKNOWN)), _error_of(task, exc))


def _is_from(report: Report | None, exc: TaskPredicate) -> bool:
    """Whether this is the end that the report speaks of, and not a later word of the task's."""
    word = None if report is None else report.ended.word
    if isinstance(exc, Ignore):
        return report is not None and report.ended.end is End.IGNORED
    return isinstance(exc, BackoffRetry) and isinstance(word, RetryIn) and word.seconds == exc.when


def _is_abort(exc: BaseException) -> bool:
    return isinstance(exc, WorkerLostError)


def _undelivered_work(run: Run, request: Any, exc: BaseException) -> GiveUpReason | None:
    """Why a task that has returned is not done: what follows it was not, or may not be, sent.

    Celery sends the callbacks and the rest of a chain first, then stores the result and with it
    the task's part of a chord. Where it failed shows in the traceback.
    """
    failed_in = set(_functions_in(exc))
    if "mark_as_done" in failed_in:
        is_lost = bool(request.get("chord"))
    else:
        is_lost = "apply_async" in failed_in and run.is_followed
    return GiveUpReason.NOT_HANDED_ON if is_lost else None


def _release_frames(exc: BaseException | None) -> None:
    """Free what the frames of a failure hold, now that they have ended.

    The tracer's own frame holds Celery's ``ExceptionInfo``, which holds the exception, which holds
    the frame: some 150 KB for each failure, until Python's oldest garbage is collected.

    The frame of a generator or a coroutine may only wait, in a client that hands its errors to its
    callers and goes on; before Python 3.13, to clear it would end it.
    """
    for _ in range(_MAX_CHAIN):
        if exc is None:
            return
        traceback = exc.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if not frame.f_code.co_flags & _MAY_WAIT:
                with suppress(RuntimeError):  # still executing: a task that runs inside of another
                    frame.clear()
            traceback = traceback.tb_next
        exc = exc.__cause__ or exc.__context__


def _functions_in(exc: BaseException | None) -> Iterator[str]:
    for _ in range(_MAX_CHAIN):  # what it was raised in the handling of, if anything
        if exc is None:
            return
        traceback = exc.__traceback__
        while traceback is not None:
            yield traceback.tb_frame.f_code.co_name
            traceback = traceback.tb_next
        exc = exc.__context__


def _small(exc: BaseException, report: Report, *, traceback: str, internal: bool) -> Any:
    """An ``ExceptionInfo`` without what makes it big: frames, and the exception's own data.

    A new one: in the pools that share the worker's process, the task's hooks have Celery's.
    """
    info = ExceptionInfo.__new__(ExceptionInfo)
    info.exception = _stand_in(exc)
    info.type = type(info.exception)
    info.traceback = traceback[-_MAX_TRACEBACK_CHARACTERS:]
    info.internal = internal
    attach_report(info, report)
    return info


def _stand_in(exc: BaseException) -> Any:
    if isinstance(exc, Retry):
        cause = None if exc.exc is None else _stand_in(exc.exc)
        return (BackoffRetry if isinstance(exc, BackoffRetry) else Retry)(exc=cause, when=exc.when)
    if isinstance(exc, Reject):
        return Reject(requeue=exc.requeue)
    if isinstance(exc, Ignore):
        return Ignore()
    if isinstance(exc, WorkerLostError):
        return WorkerLostError(str(exc))
    return FailedInPool(safe_repr(exc)[:_MAX_REPR_CHARACTERS])


def _error_of(task: Any, exc: BaseException) -> ErrorText:
    if isinstance(exc, Aborted):
        return ErrorText(exception_type=str(exc))
    return describe(exc, task.backoff_options)
