"""Wraps one run of a task. The steps are: begin, call, judge, undo, decide, report.

A run begins and ends in :func:`wrap_trace`, around Celery's tracer. In between, Celery calls the
task's ``run``, which :func:`wrap_task` has wrapped. That wrapper judges a failure (finds out
whether the work may have been processed), and decides about the message, before Celery sees the
failure. So a later failure of the result backend, a hook or the canvas cannot change the decision.
All of this happens in the process that runs the task.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial, wraps
from inspect import Parameter, getattr_static, signature
from typing import Any, Final

from celery import Task, states
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate, WorkerLostError
from celery.utils.log import get_task_logger
from celery.utils.serialization import raise_with_context
from celery.utils.threads import LocalStack
from celery.utils.time import maybe_make_aware

from ..retry.budget import GiveUpReason, Standing, draw_delay, find_reason
from ..retry.decision import DeadLetter, End, Hide, Reply, RunEnd, decide_failure
from ..retry.options import TYPE_ONLY
from ..retry.outcomes import NonRetryable, Outcome, Verdict, judge
from ..sqs.delivery import Delivery
from ..sqs.redact import ErrorText
from ..store.errors import SafeError
from ..text import error_site, printable, type_name
from .extension import Answered
from .handover import (
    DELIVERY_KEY,
    RUNNING,
    Asked,
    BackoffRetry,
    Report,
    Run,
    begin_elsewhere,
    pack,
    read_end,
    run_of,
)
from .tracing import TRACER, note_end
from .upstream import (
    contain_backend,
    contain_hooks,
    ends_the_process,
    free_frames,
    is_pools_time_limit,
    log_failed_later,
    log_known_failures_once,
    store_refusal,
)

logger = get_task_logger(__name__)

#: Header of a retry that is published to a broker other than SQS. It has the time of the first
#: failure in seconds since the epoch. ``retry_for`` counts from this time, because other brokers
#: report no receive times.
FIRST_FAILED_AT: Final = "sqs_backoff_first_failed_at"

_RETURNED: Final = Report(RunEnd(End.RETURNED))


class Aborted(BaseException):
    """Raised in place of a ``MemoryError`` that no rule of the task classifies.

    Celery would store the ``MemoryError`` as a FAILURE, but the message may still be retried.
    """


# Around Celery's tracer


def wrap_trace(task: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function by which Celery runs a task, stores its result and calls its hooks."""

    def trace_run(task_id: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        delivery = request.pop(DELIVERY_KEY, None) if request else None
        if not isinstance(delivery, Delivery):  # another broker
            return trace(task_id, args, kwargs, request)
        # Read this now. After the run it may be wrong, because Celery before 5.7 removes the next
        # task of a chain from ``request["chain"]``, even if sending that task then fails.
        is_awaited = bool(request.get("callbacks") or request.get("chain") or request.get("chord"))
        run = Run(task_id, delivery, is_awaited)
        token = RUNNING.set(run)
        try:
            contain_backend(task.backend)  # each thread has its own backend
            result = trace(task_id, args, kwargs, request)
        except BaseException as exc:
            # A time limit that comes after the end of the run does not change the run's report.
            is_limit = is_pools_time_limit(exc, task, request.get("timelimit"))
            if ends_the_process(exc) or (is_limit and run.report is None):
                raise
            return _hand_over_escaped(task, run, exc)
        finally:
            RUNNING.reset(token)
        if result.info is not None:
            # Rebind ``result``. The first result refers to the frame that failed, which refers to
            # this frame. If this frame still referred to the first result, the cycle would stay in
            # memory.
            result = _hand_over(task, run, result)
        return result

    return trace_run


def _hand_over(task: Any, run: Run, result: Any) -> Any:
    """Return the tracer's result for the main process.

    Replace its ``ExceptionInfo`` by a smaller one, which carries the run's report.
    """
    from celery.app.trace import TraceInfo  # only here, because it imports the whole worker

    exc, info = result.info.retval, result.retval
    report = _report_at_last(task, run, exc)
    small = pack(exc, report, traceback=info.traceback or "", internal=info.internal)
    free_frames(exc)
    return result._replace(retval=small, info=TraceInfo(result.info.state))


def _hand_over_escaped(task: Any, run: Run, exc: BaseException) -> Any:
    """Return the result for an exception that escaped Celery's tracer, in the tracer's form."""
    from celery.app.trace import TraceInfo, trace_ok_t  # only here, see ``_hand_over``

    report = _report_at_last(task, run, exc)
    if report is _RETURNED:
        return trace_ok_t(None, None, 0.0, None)
    if report.ended.end is End.ABORTED:
        exc = WorkerLostError(f"The run was aborted: {report.error.exception_type}")
    elif report.ended.end is not End.RETURNED:
        log_failed_later(task.name, run.task_id, exc)
    small = pack(exc, report, traceback=report.error.traceback or "", internal=True)
    return trace_ok_t(small, TraceInfo(states.FAILURE, exc), 0.0, None)


def _report_at_last(task: Any, run: Run, exc: BaseException) -> Report:
    """Return the final report of a run, when Celery's tracer has ended.

    If the task's own code has not reported, for example because Celery failed before it, this
    function makes the report.

    Arguments:
        exc: the exception with which the tracer ended.
    """
    report = run.report
    if report is None and isinstance(exc, TaskPredicate):
        return Report(read_end(exc))
    if report is None:
        # If the run has not begun, the task did no work, so the message may come back.
        end = End.RAISED if run.has_begun else End.NOT_BEGUN
        end = end if isinstance(exc, Exception) else End.ABORTED
        return Report(RunEnd(end), _describe(task, exc))
    if report is _RETURNED:
        log_failed_later(task.name, run.task_id, exc)
        if run.is_awaited:
            decision = DeadLetter(GiveUpReason.NOT_HANDED_ON, Outcome.UNKNOWN)
            return Report(RunEnd(End.RETURNED, decision), _describe(task, exc))
    return report


def _describe(task: Any, exc: BaseException) -> ErrorText:
    if isinstance(exc, Aborted):
        return ErrorText(exception_type=str(exc))
    options = task.backoff_options
    type_only = options.record_detail == TYPE_ONLY
    return ErrorText.of(exc, type_only=type_only, redact=options.redact)


# Around the task's own code


def wrap_task(cls: Any) -> None:
    """Wrap a task's own code and hooks once, and give the task a request stack of its own."""
    if "request_stack" not in vars(cls):  # Celery would use the stack of the base class
        cls.request_stack = LocalStack()
    _wrap_own(cls, "run")
    # Celery calls ``before_start``, then ``__call__``, which calls ``run``. A user's ``__call__``
    # may do more, and may fail after ``run`` has returned, such as in the commit of a transaction.
    # So wrap both if they are the user's.
    for name in ("__call__", "before_start"):
        if getattr(cls, name) is not getattr(Task, name):
            _wrap_own(cls, name)
    contain_hooks(cls)
    log_known_failures_once()


def _wrap_own(cls: Any, name: str) -> None:
    """Wrap a task's ``run``, or a ``__call__`` or ``before_start`` of its own, once.

    In a user's traceback, the wrapper must be the only function of this package. So the wrapper
    itself calls the task's code, and raises the exception that ``_end_failed`` returns.
    """
    function, given = getattr(cls, name), getattr_static(cls, name)
    if getattr(function, "_is_wrapped", False):
        return
    takes_self = not isinstance(given, staticmethod | classmethod)
    is_hook = name == "before_start"

    @wraps(function)
    def call_own(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Bind a classmethod to the task's own class, not to the base that defines ``run``.
        call = partial(function, self) if takes_self else given.__get__(None, type(self))
        request = self.request_stack.top
        if request is None or request.called_directly:  # called as a function
            return call(*args, **kwargs)
        run = run_of(request) or begin_elsewhere(request)
        if run.is_running:  # called by the task's own code, such as ``__call__``
            return call(*args, **kwargs)
        token, run.task, run.is_running = RUNNING.set(run), self, True
        try:
            if is_hook:
                _, *run.arguments = args
                return call(*args, **kwargs)
            run.has_begun, run.arguments = True, (args, kwargs)
            self.extension.before_run(self, args, kwargs)
            result = call(*args, **kwargs)
            self.extension.after_run(self, result)
        except Answered as answer:
            result = _end_answered(self, run, answer)
        except BaseException as exc:
            instead = _end_failed(self, run, exc)
            if instead is exc:
                raise
            raise instead from exc
        else:
            _end_returned(self, run)
        finally:
            run.is_running = False
            RUNNING.reset(token)
        return result

    call_own._is_wrapped = True  # type: ignore[attr-defined]
    if not takes_self:
        _sign_with_self(call_own)
    setattr(cls, name, call_own)


def _sign_with_self(wrapped: Any) -> None:
    """Add ``self`` to the signature of a function that has no such argument.

    Otherwise ``inspect`` takes the function's first argument for ``self`` when the method is bound.
    """
    with suppress(TypeError, ValueError):  # a function without a signature
        plain = signature(wrapped)
        first = Parameter("self", Parameter.POSITIONAL_ONLY)
        wrapped.__signature__ = plain.replace(parameters=[first, *plain.parameters.values()])


# The run has ended


def _end_returned(task: Any, run: Run) -> None:
    """Report that the task's code has returned."""
    if run.delivery is not None:
        run.report = _RETURNED
        if TRACER in sys.modules:
            note_end(_RETURNED.ended, run.delivery, attempt=task.request.retries + 1)


def _end_answered(task: Any, run: Run, answer: Answered) -> Any:
    """Return the result of an earlier run, or raise an exception that ends the message.

    Raises:
        Ignore: there is no result to return.
        Exception: the result is lost, but a chain, a callback or a chord needs it.
    """
    request = task.request
    is_lost = answer.is_done and not answer.has_result
    if is_lost and (request.chain or request.callbacks or request.chord):
        # Perhaps the earlier run did not send its result to the chain, callbacks or chord.
        raise _end_failed(task, run, answer) from None
    if answer.has_result:
        _end_returned(task, run)
        return answer.result
    if not answer.is_done:
        try:
            task.extension.refused(task, run)
        except Exception as exc:  # noqa: BLE001  # the store or the broker may raise any exception
            raise _end_failed(task, run, exc) from None
    logger.info(
        "sqs_backoff.refused: %s[%s] ends without a run: %s",
        *(printable(task.name), printable(request.id), answer),
    )
    try:
        if not request.is_eager:
            store_refusal(task, answer.result)
    except Exception as exc:  # noqa: BLE001  # the result backend may raise any exception
        logger.error("sqs_backoff.refusal_not_stored: %s", error_site(exc))
        if request.chord:
            decision = DeadLetter(GiveUpReason.NOT_HANDED_ON, Outcome.UNKNOWN)
            _report(task, run, RunEnd(End.IGNORED, decision), exc)
    raise Ignore(answer.result) from None


def _end_failed(task: Any, run: Run, exc: BaseException) -> BaseException:
    """Judge, undo, decide and report a failure, and return the exception to raise for Celery."""
    if ends_the_process(exc) or is_pools_time_limit(exc, task, task.request.timelimit):
        return exc
    is_ours = run.delivery is not None
    if is_ours and isinstance(exc, Retry):
        exc = _retry_in_place_of(task, exc)
    if isinstance(exc, TaskPredicate):
        _end_asked(task, run, exc)
        return exc  # type: ignore[no-any-return]
    if not is_ours:
        return _end_elsewhere(task, run, exc) if isinstance(exc, Exception) else exc
    if isinstance(exc, SystemExit):
        # In the pools that share the worker's process, a ``SystemExit`` would end the worker
        # (solo), or the worker would never settle the message (threads, gevent:
        # celery/concurrency/base.py).
        exc = WorkerLostError(f"The task called sys.exit({exc.code!r})")
    cause = _cause_of(run, exc)
    failure, verdict = exc, _judge(task, cause)
    if isinstance(exc, MemoryError) or not isinstance(exc, Exception):
        if verdict is None:  # the task may have done a part of its work
            _report(task, run, RunEnd(End.ABORTED), exc)
            return Aborted(type_name(exc)) if isinstance(exc, Exception) else exc
        if not isinstance(exc, Exception):
            failure = WorkerLostError(f"The task raised {type_name(exc)}")
    run.is_known = verdict is not None
    reply = _reply_of(cause, verdict)
    verdict = _undo(task, run, failure, verdict or _UNKNOWN, raised=exc)
    asked = run.get_asked(exc)
    if asked is not None and asked.reason is not None:
        decision: Hide | DeadLetter = DeadLetter(asked.reason, verdict.outcome)
    else:
        decision = _decide(task, run, exc, verdict)
    _report(task, run, RunEnd(End.RAISED, decision, reply), exc)
    return (
        BackoffRetry(exc=failure, when=decision.seconds) if isinstance(decision, Hide) else failure
    )


def _end_asked(task: Any, run: Run, said: TaskPredicate) -> None:
    """Report the end of a run that the task itself has decided, by Retry, Ignore or Reject."""
    asked, reported, reply = run.get_asked(said), said, None
    if isinstance(said, Ignore):
        task.extension.run_failed(task, said, _UNKNOWN)
    else:  # judge the error for which the task raised the Retry or Reject
        cause = _cause_of(run, said)
        verdict = _judge(task, cause)
        run.is_known = verdict is not None
        if isinstance(said, Retry):
            run.is_known = run.is_known and isinstance(said, BackoffRetry)
            reply, reported = _reply_of(cause, verdict), cause or said
            _undo(task, run, reported, verdict or _UNKNOWN, raised=said)
        else:
            task.extension.run_failed(task, cause or said, verdict or _UNKNOWN)
    ended = read_end(said, is_named=asked is not None and asked.is_named)
    _report(task, run, replace(ended, reply=reply), reported)


def _end_elsewhere(task: Any, run: Run, exc: Exception) -> BaseException:
    """Handle a failure on another broker, or of an eager task. Return the exception to raise.

    If the task is retried, the exception is Celery's ``Retry`` for a copy that is published with
    our delay. Otherwise it is the failure.
    """
    request, now = task.request, time.time()
    verdict = _judge(task, _cause_of(run, exc)) or _UNKNOWN
    verdict = _undo(task, run, exc, verdict, raised=exc)
    # Eager retries do not wait. Without a limit, they would go on as fast as they can.
    is_endless = request.is_eager and task.max_retries is None
    if verdict.wants_retry and run.get_asked(exc) is None and not is_endless:
        delay = _draw_delay(task, run.delivery, verdict, exc)
        headers = dict(request.headers or {})
        elapsed = now - headers.setdefault(FIRST_FAILED_AT, now)
        spent = find_reason(
            Standing(retries=request.retries, elapsed=elapsed),
            max_retries=task.max_retries,
            retry_for=task.backoff_options.retry_for,
            delay=delay,
        )
        if spent is None:
            given = {"exc": exc, "countdown": delay, "headers": headers, "throw": False}
            retry = partial(Task.retry, task, **given)
            return _publish(task, request.retries + 1, retry)  # type: ignore[no-any-return]
    task.extension.given_up(task, request.id, run=run.id, began=now)
    return exc


# Judge


#: The verdict on a failure that no rule knows.
_UNKNOWN: Final = Verdict(Outcome.UNKNOWN)


def judge_failure(task: Any, exc: BaseException) -> Verdict:
    """Return the verdict on a failure of a run, or on a retry that the task has asked for."""
    return _judge(task, _cause_of(run_of(task.request), exc)) or _UNKNOWN


def _cause_of(run: Run | None, exc: BaseException) -> BaseException | None:
    """Return the error to judge for an exception, or ``None`` if the task names no error.

    * For an exception of ``self.retry()``, it is the error for which the task retries.
    * For a Retry or Reject that the task raised by hand, it is the error inside. Without an
      error inside, it is the error that the task was handling. Without such an error, a Reject that
      gives the message up is judged itself. ``None`` would mean that no work was done.
    * Any other exception is itself the error to judge.
    """
    asked = None if run is None else run.get_asked(exc)
    if asked is not None:
        return asked.cause
    if isinstance(exc, Retry):
        return exc.exc or exc.__context__  # type: ignore[no-any-return]
    if isinstance(exc, Reject):
        cause = exc.reason if isinstance(exc.reason, Exception) else exc.__context__
        return cause or (None if exc.requeue else exc)
    return exc


def _judge(task: Any, cause: BaseException | None) -> Verdict | None:
    """Return the verdict on an error, or ``None`` if no rule knows it.

    ``None`` as the error means that the task has asked for a retry and named no error. This is
    RETRYABLE, because a task that asks for a retry says that it has done no work.
    """
    if cause is None:
        return Verdict(Outcome.RETRYABLE)
    if isinstance(cause, Reject):  # the task has decided, so no rule is asked
        return _UNKNOWN
    options = task.backoff_options
    return judge(
        cause,
        classify=options.classify,
        retry_on=options.retry_on,
        never_retry=options.never_retry,
        task=task.name,
    )


def _reply_of(exc: BaseException | None, verdict: Verdict | None) -> Reply | None:
    """Return the reply of the task's provider, if the failure shows one.

    Arguments:
        exc: the failure, or ``None`` if the task has asked for a retry and named no error.
        verdict: ``None`` if no rule knows the failure.
    """
    if exc is None or isinstance(exc, SafeError) or verdict is None:
        return None
    if verdict.outcome is Outcome.NOT_PROCESSED:
        return Reply.ANSWERED
    if isinstance(exc, NonRetryable):
        return None
    return Reply.FAILED if verdict.retry_after is None else Reply.REFUSED


# Undo, decide, report


def _undo(
    task: Any, run: Run, cause: BaseException, verdict: Verdict, *, raised: BaseException
) -> Verdict:
    """Call ``on_not_processed`` if it is certain that no run has done the task's work.

    Returns:
        The verdict, or UNKNOWN in its place if an earlier run may have done the work.
    """
    if run.copy is not None and run.copy is not raised:
        return verdict  # an undo might destroy the work of the copy
    verdict = task.extension.run_failed(task, cause, verdict)
    undo = task.backoff_options.on_not_processed
    if undo is not None and verdict.nothing_was_processed:
        try:
            undo(task, cause, *run.arguments)
        except Exception as failure:  # noqa: BLE001  # the user's code may raise any exception
            # Go on, because an undo that fails must not prevent the retry. Log no traceback,
            # because it would quote the text of the task's own failure.
            logger.error(
                "sqs_backoff.on_not_processed_failed: task %s: %s",
                *(printable(task.name), error_site(failure)),
                extra={"task_name": task.name},
            )
    return verdict


def _decide(task: Any, run: Run, exc: BaseException, verdict: Verdict) -> Hide | DeadLetter:
    """Decide by the verdict on the failure whether the message is hidden or given up."""
    assert run.delivery is not None
    now, options = time.time(), task.backoff_options
    delay = _draw_delay(task, run.delivery, verdict, exc) if verdict.wants_retry else 0.0
    decision = decide_failure(
        verdict,
        run.delivery.standing(retries=int(task.request.retries), now=now),
        max_retries=task.max_retries,
        retry_for=options.retry_for,
        delay=delay,
    )
    if isinstance(decision, Hide):
        return replace(decision, seconds=run.delivery.visibility_delay(delay, now=now))
    return decision


def _draw_delay(
    task: Any,
    delivery: Delivery | None,
    verdict: Verdict | None = None,
    exc: BaseException | None = None,
) -> float:
    """Draw the seconds until the retry.

    An error such as ``Busy`` may limit the delay by its attribute ``retry_before``.
    """
    request = task.request
    delay = draw_delay(
        task.backoff_options,
        message_id=request.id if delivery is None else delivery.message_id,
        attempt=int(request.retries) + 1,
        is_fifo=delivery is not None and delivery.is_fifo,
        rng=random,
    )
    if verdict is not None:
        delay += verdict.retry_after or 0.0
    before: float | None = getattr(exc, "retry_before", None)
    return delay if before is None else min(delay, before)


def _report(task: Any, run: Run, ended: RunEnd, exc: BaseException) -> None:
    """Report how the run has ended, to the main process and to an OpenTelemetry span."""
    if run.delivery is not None:
        # Without a dead letter, only the error's type is shown. Formatting the rest is slow.
        is_brief = ended.decision is None and ended.end in (End.RETRY_ASKED, End.IGNORED)
        is_brief = is_brief or isinstance(ended.decision, Hide)
        error = ErrorText(exception_type=type_name(exc)) if is_brief else _describe(task, exc)
        if TRACER in sys.modules:
            trace = note_end(ended, run.delivery, attempt=task.request.retries + 1)
            error = replace(error, trace=trace)
        run.report = Report(ended, error)


# The retry that a task asks for by ``self.retry()``

#: Types of arguments that a task cannot change in place.
_UNCHANGEABLE = (str, bytes, int, float, type(None))


def retry_task(
    task: Any,
    args: Any = None,
    kwargs: Any = None,
    exc: Any = None,
    throw: bool = True,
    eta: datetime | None = None,
    countdown: float | None = None,
    max_retries: int | None = None,
    **options: Any,
) -> Any:
    """Retry as ``celery.Task.retry`` does, but if possible hide the message and publish no copy.

    The arguments are Celery's. Without ``countdown`` (seconds) and ``eta`` the delay is drawn from
    ``backoff`` instead of being ``default_retry_delay``. The message is hidden if arguments and
    route have not changed, ``throw`` is true, and SQS can hide the message for the whole delay. SQS
    can hide it until 12 hours after the receive, but not beyond the queue's retention period. In
    all other cases a copy is published immediately, as Celery does. With ``max_retries=0`` the task
    fails now and is not retried, even if ``classify`` or ``retry_on`` makes the error retryable.

    Raises:
        celery.exceptions.Retry: the task is retried, and ``throw`` is true.
        celery.exceptions.Reject: the broker has not accepted the copy.
        exc, or MaxRetriesExceededError: no retry is left.
    """
    if not task.is_covered or task.request.called_directly:
        return Task.retry(task, args, kwargs, exc, throw, eta, countdown, max_retries, **options)
    request, now = task.request, time.time()
    run: Any = run_of(request)
    delivery: Any = None if run is None else run.delivery
    if isinstance(exc, type):
        exc = _make(exc)
    cause = exc if isinstance(exc, BaseException) else sys.exc_info()[1]
    retries = int(request.retries)
    limit = task.max_retries if max_retries is None else max_retries
    is_named = countdown is not None or eta is not None
    if not is_named:
        countdown = _draw_delay(task, delivery)
    delay = seconds_until(eta, task, now) if countdown is None else countdown

    can_hide = throw and delivery is not None and not _is_changed(request, args, kwargs, options)
    seconds = delivery.visibility_delay(delay, now=now) if can_hide else 0
    is_hidden = can_hide and delay <= seconds
    reason = GiveUpReason.MAX_RETRIES if limit is not None and retries >= limit else None
    if reason is None and is_hidden:
        reason = find_reason(
            delivery.standing(retries=retries, now=now),
            max_retries=limit,
            retry_for=task.backoff_options.retry_for,
            delay=delay,
        )
    if reason is not None:
        failure = exc
        if failure is None:
            failure = task.MaxRetriesExceededError(
                f"Can't retry {task.name}[{request.id}]: {reason.value}",
                task_args=request.args,
                task_kwargs=request.kwargs,
            )
        if run is not None:
            run.asked = Asked(failure, cause, reason)
        raise_with_context(failure)
    if is_hidden:
        raised = BackoffRetry(exc=exc, when=seconds)
        run.asked = Asked(raised, cause, is_named=is_named)
        raise raised
    try:
        given = (task, args, kwargs, exc, False, eta, countdown)
        copy = _publish(task, retries + 1, partial(Task.retry, *given, **options))
    except Reject as refused:  # Celery raises it if the broker does not accept the copy
        if run is not None:
            run.asked = Asked(refused, cause)
        raise
    if run is not None:
        run.copy, run.asked = copy, Asked(copy, cause)
    if throw:
        raise copy
    return copy


def _publish(task: Any, retries: int, celerys_retry: Callable[..., Retry]) -> Retry:
    """Publish a copy of the message as retry number ``retries``."""
    request = task.request
    before, request.retries = request.retries, retries - 1  # Celery adds one
    try:
        return celerys_retry(max_retries=retries)
    finally:
        request.retries = before


def seconds_until(eta: datetime | None, task: Any, now: float) -> float:
    """Return the seconds until an ETA, or 0 without an ETA."""
    return 0.0 if eta is None else maybe_make_aware(eta, task.app.timezone).timestamp() - now


def _retry_in_place_of(task: Any, raised: Retry) -> Exception:
    """Retry a task that raised ``Retry``, but did not call its ``retry()``.

    Return the error to raise. The task's code may raise ``Retry`` by hand. Or it calls another task
    as a function, and the ``retry()`` of that task raises ``Retry`` and publishes nothing. Celery
    would assume that a copy was published, and acknowledge the message. So this function calls the
    running task's ``retry()``. A task that overrides ``retry()`` may have published a copy, so its
    ``Retry`` is returned unchanged.
    """
    has_message = raised.sig is not None or isinstance(raised, BackoffRetry)
    if has_message or type(task).retry is not retry_task:
        return raised  # type: ignore[no-any-return]
    cause = raised.exc or raised.__cause__ or raised.__context__
    if not isinstance(cause, Exception) or isinstance(cause, TaskPredicate):
        cause = None
    when = {"eta" if isinstance(raised.when, datetime) else "countdown": raised.when}
    try:
        task.retry(exc=cause, **when)
    except Exception as asked:  # noqa: BLE001  # Retry, Reject, or the failure itself
        return asked.with_traceback(None)
    return raised  # type: ignore[no-any-return]


def _make(error: type[BaseException]) -> BaseException:
    """Make an error of the given class, or return the error that its constructor raises."""
    try:
        return error()
    except Exception as failure:  # noqa: BLE001  # such as a TypeError: it needs arguments
        return failure


def _is_changed(request: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the arguments of ``retry()`` may differ from the message's.

    A list or a dict counts as changed. The task may have changed it in place, and a comparison
    would find no difference, because the request holds the same object.
    """
    named = [*(args or ()), *(kwargs or {}).values()]
    if not all(isinstance(value, _UNCHANGEABLE) for value in named):
        return True
    same_args = args is None or list(args) == list(request.args or ())
    same_kwargs = kwargs is None or (
        kwargs is not request.kwargs and dict(kwargs) == dict(request.kwargs or {})
    )
    same_queue = {"queue": (request.delivery_info or {}).get("routing_key")}
    return not (same_args and same_kwargs and (not options or options == same_queue))
