"""A task on its way through the pool: Celery's callbacks, turned into how the run ended.

All callbacks run in the worker's main process, most of them in its event loop. Each settles the
message first and reports to Celery (results, hooks, signals, events) after that, contained: a
failure there is logged, and has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import signals, states
from celery.exceptions import Retry, TaskPredicate, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr, safe_str

from ..observe.events import LeaseLost
from ..retry.decision import DeadLetter, End, GiveBack, Hide, RunEnd, Settle
from ..retry.options import TYPE_ONLY, Options
from ..retry.outcomes import Outcome
from ..sqs.redact import ErrorText
from ..task.handover import DELIVERY_KEY, read_end, report_of
from ..text import error_site, printable
from .inbox import is_stopping
from .lease import Lease
from .settle import Settler

logger = get_logger(__name__)

_NO_ERROR = ErrorText()


class SettledBeforeRun(Exception):
    """The message of a request is no longer this worker's: the task must not run."""


class BackoffRequest(Request):  # type: ignore[misc]  # Celery is not typed
    """Celery's request, settling the lease where Celery would ack or reject.

    Raises:
        SettledBeforeRun: the message's budget was used up before this receive.
    """

    acknowledged: bool  # Celery's: whether the message has been settled

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Celery generates a subclass per task, and its ``on_success`` does not call ours."""
        super().__init_subclass__(**kwargs)
        if "on_success" in vars(cls):
            cls.on_success = _settling_first(cls.on_success)

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self._cancelling = False
        self.lease = lease = cast(Lease, message.sqs_lease)
        lease.handed_to_pool = partial(was_handed_to_pool, self)
        lease.on_lost = self._on_lost
        # The headers of a message never change, so these describe the first time that it was sent.
        earlier_runs = lease.delivery.earlier_runs
        self.retries: int = (self._request_dict.get("retries") or 0) + earlier_runs
        self._request_dict["retries"] = self.retries
        self._delivery_info["redelivered"] = earlier_runs > 0
        self._settler = Settler(self, lease)
        if lease.refused is not None:
            self.refuse()
            raise SettledBeforeRun

    @property
    def request_dict(self) -> dict[str, Any]:
        """The request for the pool, with the delivery, which the tracer takes out again.

        In the task's own ``self.request`` it would be taken for a custom header, and be copied to
        the tasks that this one sends.
        """
        return {**self._request_dict, DELIVERY_KEY: self.lease.delivery}

    def refuse(self) -> None:
        """Give the message up without running its task, because admission has refused it."""
        assert self.lease.refused is not None
        reason = self.lease.refused
        failure = self.task.MaxRetriesExceededError(f"{_named(self)} was not run: {reason.value}")
        ended = RunEnd(End.REFUSED, DeadLetter(reason, Outcome.UNKNOWN))
        self._end(ended, ErrorText.of(failure, traceback=""), _exc_info(failure))

    def _on_lost(self) -> None:
        """Tell the task by a file, and the observers. The keeper's thread calls this.

        The task may run in another process, which may have been forked before the message was
        received, or spawned. Both have the file system. A full or read-only disk is logged.
        """
        lease = self.lease
        path = Path(lease.delivery.lost_flag or "")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch()
        except OSError as exc:
            logger.error("sqs_backoff.flag_failed: %s", error_site(exc))
        lost = LeaseLost(
            queue=lease.queue.name, task=self.type, task_id=self.id, message_id=lease.message_id
        )
        lease.keeper.events.emit(lost)

    def may_begin(self) -> bool:
        """Return whether the task may begin, now that there is a process for it.

        It may have waited for one since it was admitted, and its provider may be down by now.
        """
        lease, gate, options = self.lease, self.lease.gate, self.lease.options
        try:
            if not lease.may_start():
                if gate is not None:
                    gate.not_begun(lease)
            elif gate is None or options is None or gate.lets_begin(lease, options):
                return True
        except Exception as exc:  # noqa: BLE001  # it would end the worker, or a pool drops the run
            self._end(RunEnd(End.NOT_BEGUN), ErrorText.of(exc, traceback=""), _exc_info(exc))
        forget(self)
        return False

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Run just before the task where the pool shares this process, else after it was begun.

        Raises:
            SettledBeforeRun: the message is settled, lost, or hidden because its provider is down;
                the task must not begin.
        """
        begins_now = pid == os.getpid()
        if begins_now and not self.may_begin():
            self.lease.release()  # if it was lost: its run will not begin
            raise SettledBeforeRun
        self.lease.slot_at = None  # it is used
        try:
            super().on_accepted(pid, time_accepted)
        except Exception as exc:
            if not begins_now:
                raise
            # The pool would drop the run silently.
            self._end(RunEnd(End.NOT_BEGUN), ErrorText.of(exc, traceback=""), _exc_info(exc))
            raise SettledBeforeRun from exc

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """End the run for a cold shutdown or after a lost connection, where the pool can.

        Solo and threads cannot: there the task ends without help. Celery's error would make it
        fail.
        """
        self._cancelling = True  # first: eventlet's pool calls back before this returns
        try:
            super().cancel(pool, signal, **options)  # emit_retry, from Celery 5.6 on
        except NotImplementedError:
            self._cancelling = False
            logger.info("Task %s cannot be cancelled in this pool", _named(self))

    def cut_short(self) -> None:
        """Settle a run that ends with the worker, so that another worker may start the message."""
        self._end(RunEnd(End.CANCELLED), _NO_ERROR, None)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        # Celery 5.5 and 5.6 cancel all requests in one loop, which contains no error.
        _contained(self, partial(super()._announce_cancelled, *args, **kwargs))
        self._already_cancelled = True

    # Celery's callbacks when a run has ended

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        ended, error = _read_end(self, exc_info, is_cancelling=self._cancelling)
        self._end(ended, error, exc_info, send_failed_event, return_ok)

    def _success_was_stored(self) -> bool:
        """Celery 5.7 asks this when the message of a run without a process is settled."""
        return False

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if soft:
            super().on_timeout(soft, timeout)
        elif not self.acknowledged:  # else on_failure, which prefork calls first, has seen to it
            logger.error("Hard time limit (%ss) exceeded for %s", timeout, _named(self))
            self.on_failure(_exc_info(TimeLimitExceeded(timeout)))

    def acknowledge(self) -> None:
        """Settle the lease as done, unless it has been settled before Celery asked for it."""
        if not self.acknowledged:
            self._settler.settle(RunEnd(End.RETURNED), _NO_ERROR)

    def reject(self, requeue: bool = False) -> None:
        """Settle the lease as rejected, unless it has been settled before Celery asked for it."""
        self._settler.settle(RunEnd(End.REQUEUED if requeue else End.REJECTED), _NO_ERROR)
        self.send_event("task-rejected", requeue=requeue)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Settle before Celery stores the result. A message that comes back is announced later."""
        announce = partial(super()._announce_revoked, reason, terminated, signum, expired)
        settle = self._settler.settle(RunEnd(End.REVOKED), _NO_ERROR)
        _contained(self, partial(state.task_ready, self) if isinstance(settle, Hide) else announce)
        self._already_revoked = True

    # One end, one settlement

    def _end(
        self,
        ended: RunEnd,
        error: ErrorText,
        exc_info: Any,
        send_failed_event: bool = True,
        return_ok: bool = False,
    ) -> None:
        settle = self._settler.settle(ended, error)
        if settle is not None:
            report = partial(super().on_failure, exc_info, send_failed_event, return_ok)
            _contained(self, self._report, ended, settle, exc_info, report)

    def _report(
        self, ended: RunEnd, settle: Settle, exc_info: Any, report: Callable[..., object]
    ) -> None:
        """Let Celery store results, call hooks, and send signals and events."""
        is_crash = ended.decision is None and ended.end.is_crash
        # It is told when the message is settled, and not when it comes back first.
        comes_back = not ended.end.is_run and isinstance(settle, Hide)
        if isinstance(settle, GiveBack):
            state.task_ready(self)
        elif isinstance(settle, Hide) and is_crash:
            state.task_ready(self)
            _announce_retry(self, _failure(exc_info), exc_info, int(settle.seconds))
        elif isinstance(ended.decision, Hide) or comes_back:
            state.task_ready(self)
            exc = _raised(exc_info)
            _send_retried(self, getattr(exc, "exc", None) or exc, exc_info.traceback)
        elif ended.end is End.ABORTED:
            self._report_lost(_exc_info(_failure(exc_info)))
        else:
            report()
            if ended.end is End.TIME_LIMIT:
                _call_hooks(self, _raised(exc_info), exc_info)

    def _report_lost(self, exc_info: Any) -> None:
        """Celery would raise a ``MemoryError`` again, and store no result."""
        super().on_failure(exc_info)


def forget(request: Request) -> None:
    """Let Celery drop a request, which it keeps with the body until its task has ended."""
    if state.requests.get(request.id) is request:
        state.task_ready(request)


def was_handed_to_pool(request: Request) -> bool:
    """Return whether the task of a request may be running.

    Pools keep the result that Celery refers to weakly as long as they mean to run the task, but for
    the thread pool: there a task that waits for a thread can be kept from starting.
    """
    waits = request._apply_result is not None and request._apply_result() is not None
    return waits or request.time_start is not None


# How a run ended that did not return


def _read_end(request: Any, exc_info: Any, *, is_cancelling: bool) -> tuple[RunEnd, ErrorText]:
    """Return how a run ended, and the parts of its error that may be recorded.

    A process that is lost while the worker stops is no crash: supervisors signal the whole process
    group (dumb-init), or all processes of a service (systemd).

    Arguments:
        request: Celery's, of the run.
        exc_info: the pool's report.
        is_cancelling: the worker ends this run itself: a cold shutdown, or a lost connection.
    """
    exc, report = _raised(exc_info), report_of(exc_info)
    if report is not None:
        ended, error = report.ended, report.error
    else:
        ended = RunEnd(_end_by(exc))
        if isinstance(exc, TaskPredicate):
            ended = read_end(exc)
        error = _error_of(exc, exc_info.traceback, request.task.backoff_options)
    if ended.decision is None:
        was_ended = ended.end.is_crash or isinstance(exc, Terminated)
        code = state.should_terminate  # True or an exit code, which may be 0
        is_cold = is_cancelling or (code is not None and code is not False)
        if (is_cold and was_ended) or (is_stopping() and ended.end is End.PROCESS_LOST):
            return RunEnd(End.CANCELLED), error
    return ended, error


def _raised(exc_info: Any) -> BaseException:
    """Return the exception itself. In-process pools wrap it together with its traceback."""
    exc = exc_info.exception
    unwrapped: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return unwrapped


def _end_by(exc: BaseException) -> End:
    if isinstance(exc, Terminated):
        return End.REVOKED
    if isinstance(exc, TimeLimitExceeded):
        return End.TIME_LIMIT
    if isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt):
        return End.PROCESS_LOST if isinstance(exc, WorkerLostError) else End.ABORTED
    if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
        return End.RAISED
    return End.ABORTED


def _error_of(exc: BaseException, traceback: str | None, options: Options) -> ErrorText:
    """Describe an error that the task's process did not describe.

    The user's ``redact`` may take its time, and this process has no time: with a ``redact`` only
    the exception's type is kept.
    """
    type_only = options.record_detail == TYPE_ONLY or options.redact is not None
    return ErrorText.of(exc, traceback=traceback, type_only=type_only)


def _failure(exc_info: Any) -> Exception:
    """Return the error of a run. Celery before 5.7 stores only subclasses of ``Exception``."""
    exc = _raised(exc_info)
    if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
        return exc
    return WorkerLostError(f"The run was aborted: {type(exc).__name__}")  # type: ignore[no-any-return]


def _announce_retry(request: BackoffRequest, exc: Exception, exc_info: Any, delay: int) -> None:
    """Announce a retry as the task's own process would, if it could not."""
    task, context = request.task, request._context
    if request.store_errors:
        store = partial(task.backend.mark_as_retry, request=context)
        _contained(request, store, request.id, exc, exc_info.traceback)
    _send_retried(request, exc, exc_info.traceback)
    reason = Retry(exc=exc, when=delay)
    task.request_stack.push(context)
    try:
        task.on_retry(exc, request.id, request.args, request.kwargs, exc_info)
        signals.task_retry.send(sender=task, request=context, reason=reason, einfo=exc_info)
    finally:
        task.request_stack.pop()
    logger.info("Task %s retry: %s", _named(request), reason)


def _call_hooks(request: BackoffRequest, exc: BaseException, exc_info: Any) -> None:
    """Call the hooks of a failed task as its own process would. Celery before 5.7 does not."""
    task, arguments = request.task, (request.id, request.args, request.kwargs, exc_info)
    task.request_stack.push(request._context)
    try:
        task.on_failure(exc, *arguments)
        task.after_return(states.FAILURE, exc, *arguments)
    finally:
        task.request_stack.pop()


def _send_retried(request: BackoffRequest, exc: BaseException, traceback: object) -> None:
    request.send_event("task-retried", exception=safe_repr(exc), traceback=safe_str(traceback))


def _named(request: BackoffRequest) -> str:
    return f"{printable(request.name)}[{printable(request.id)}]"


def _contained(request: BackoffRequest, callback: Callable[..., object], *args: Any) -> None:
    """Call a result backend or a hook, and log its error, because the message is settled."""
    try:
        callback(*args)
    except Exception as exc:  # noqa: BLE001  # Celery's and users' code; its error would be lost
        logger.error(
            "sqs_backoff.callback_failed: task %s: its message is settled all the same; %s",
            _named(request),
            error_site(exc),
            extra={"task_id": request.id},
        )


def _settling_first(on_success: Callable[..., None]) -> Callable[..., None]:
    """Return the pool's callback of a run that has ended, around Celery's."""

    @wraps(on_success)
    def settle_and_report(self: BackoffRequest, result: Any, **kwargs: Any) -> None:
        if isinstance(result, ExceptionInfo):  # threads, gevent, solo: celery/concurrency/base.py
            self.on_failure(result)
            return
        failed, retval, runtime = result
        if failed:
            self.on_failure(retval, return_ok=True)
        elif self._cancelling and runtime is None:
            # gevent and eventlet report a greenlet they killed as a success.
            self.cut_short()
        else:
            self._settler.settle(RunEnd(End.RETURNED), _NO_ERROR)
            _contained(self, partial(on_success, self, result, **kwargs))

    return settle_and_report


BackoffRequest.on_success = _settling_first(Request.on_success)


def _exc_info(exc: BaseException) -> Any:
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()
