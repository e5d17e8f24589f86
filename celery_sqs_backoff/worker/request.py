"""The request class of an ``SQSBackoffTask``, in place of Celery's class.

A request finds out how a run ended, and settles its message. All its callbacks run in the worker's
main process, most of them in the event loop. Each callback first settles the message (deletes,
hides or dead-letters it, or lets SQS show it again), and then reports to Celery (results, hooks,
signals, events). A failure in a report is logged, and has no effect on the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import signals, states
from celery.exceptions import (
    Reject,
    Retry,
    TaskPredicate,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr, safe_str

from ..observe.events import LeaseLost
from ..retry.budget import GiveUpReason
from ..retry.decision import DeadLetter, End, GiveBack, Hide, RunEnd
from ..retry.options import TYPE_ONLY
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
    """The message is settled, lost or hidden, so its task must not run."""


class BackoffRequest(Request):  # type: ignore[misc]  # Celery is not typed
    """A Celery request that settles its message by a :class:`.Lease`, not by an ack or a reject.

    Raises:
        SettledBeforeRun: ``Admission.admit`` has decided to give the message up, and the
            constructor has settled it.
    """

    acknowledged: bool  # Celery's own attribute. Here it means that the message is settled.

    _report_success = Request.on_success

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let our ``on_success`` run before the one that Celery generates.

        Celery generates a subclass for each task, with an ``on_success`` that does not call ours.
        """
        super().__init_subclass__(**kwargs)
        if "on_success" in vars(cls):
            cls._report_success = cls.on_success
            cls.on_success = BackoffRequest.on_success  # type: ignore[method-assign]

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self._cancelling = False
        self.lease = lease = cast(Lease, message.sqs_lease)
        lease.handed_to_pool = partial(was_handed_to_pool, self)
        lease.on_lost = self._on_lost
        # A retry by this package keeps the message and its headers, so the header ``retries`` does
        # not count such retries. Add the earlier runs of this message here.
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
        """The request as the pool gets it, with the :class:`.Delivery` of its message.

        ``run.wrap_trace`` takes the delivery out again in the task's process. Else Celery would
        take it for a custom header, and copy it to the tasks that this task sends.
        """
        return {**self._request_dict, DELIVERY_KEY: self.lease.delivery}

    def refuse(self) -> None:
        """Give the message up without running its task, for the reason in ``lease.refused``."""
        assert self.lease.refused is not None
        reason = self.lease.refused
        failure = self.task.MaxRetriesExceededError(f"{_named(self)} was not run: {reason.value}")
        has_run = reason is not GiveUpReason.NEVER_DUE or self.retries > 0
        outcome = Outcome.UNKNOWN if has_run else Outcome.NOT_PROCESSED
        refused = RunEnd(End.REFUSED, DeadLetter(reason, outcome))
        self.on_failure(_exc_info(failure), ended=refused)

    def _on_lost(self) -> None:
        """Create the file that makes the task's ``lease_lost`` true, and emit an event.

        The task may run in another process, which can see a file but not this process's memory. If
        the file cannot be created, log the error. Safe in any thread.
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

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Note that the task begins. Celery calls this."""
        self.lease.has_turn = False  # the permission from its provider's gate is used up
        super().on_accepted(pid, time_accepted)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """Cancel the run, at a cold shutdown or after a lost connection. Celery calls this.

        The pools solo and threads cannot cancel a run, so the task runs to its end. Catch Celery's
        error about that. With the pool solo, a signal handler calls this method during the run, and
        the error would make the task fail.
        """
        self._cancelling = True  # first, because eventlet's pool calls back before cancel() returns
        try:
            super().cancel(pool, signal, **options)  # Celery 5.6 and later have emit_retry
        except NotImplementedError:
            self._cancelling = False
            logger.info(
                "Task %s cannot be cancelled in this pool; it runs to its end", _named(self)
            )

    def cut_short(self) -> None:
        """Let SQS show the message again, because the worker stops or has cancelled the run."""
        if self._settler.settle(RunEnd(End.CANCELLED), _NO_ERROR) is not None:
            state.task_ready(self)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        # Celery 5.5 and 5.6 cancel all requests in one loop. An error would end the loop.
        with _contained(self):
            super()._announce_cancelled(*args, **kwargs)
        self._already_cancelled = True

    # Celery's callbacks when a run has ended: read the end, settle the message, report

    def on_success(self, result: Any, **kwargs: Any) -> None:
        # The pools threads, gevent and solo pass failures to this method, too
        # (celery/concurrency/base.py).
        if isinstance(result, ExceptionInfo):
            self.on_failure(result)
            return
        failed, retval, runtime = result
        if failed:
            self.on_failure(retval, return_ok=True)
        elif self._cancelling and runtime is None:
            # If gevent or eventlet has killed a greenlet, it reports a success for its run.
            self.cut_short()
        else:
            self._settler.settle(RunEnd(End.RETURNED), _NO_ERROR)
            with _contained(self):
                self._report_success(result, **kwargs)

    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: bool = True,
        return_ok: bool = False,
        ended: RunEnd | None = None,
    ) -> None:
        """Settle the message of a run that ended with an error. Let Celery report the failure.

        Arguments: as for Celery's method, and
            ended: how the run ended. ``None``: read it from the report of the task's process, or
                else from the error. If ``ended`` is given, the worker itself has raised the error.
                The traceback does not show the task's code, so the dead letter omits it.
        """
        exc = _raised(exc_info)
        if ended is None:
            ended, error = _read_end(self, exc, exc_info)
        else:
            error = ErrorText.of(exc, traceback="")
        settle = self._settler.settle(ended, error)
        if settle is None:
            return
        with _contained(self):
            if isinstance(settle, GiveBack):
                state.task_ready(self)
            elif isinstance(settle, Hide) and not isinstance(exc, Reject):
                # The message comes back, so announce a retry and no failure. If the worker gives
                # the message up later, it announces the failure then.
                state.task_ready(self)
                is_crash = ended.decision is None and ended.end.is_crash
                cause = _failure(exc) if is_crash else getattr(exc, "exc", None) or exc
                traceback = safe_str(exc_info.traceback)
                self.send_event("task-retried", exception=safe_repr(cause), traceback=traceback)
                if is_crash:
                    _announce_retry(self, cause, exc_info, settle)
            elif ended.end is End.ABORTED:
                # Celery would raise a ``MemoryError`` again, and store no result. So pass a
                # ``WorkerLostError`` to Celery.
                super().on_failure(_exc_info(_failure(exc)))
            else:
                super().on_failure(exc_info, send_failed_event, return_ok)
                if ended.end is End.TIME_LIMIT:
                    _call_hooks(self, exc, exc_info)

    def _success_was_stored(self) -> bool:
        """Return ``False``, so that Celery 5.7 does not search for a result.

        By that search, Celery would decide whether to ack the message after the task's process was
        lost. Here the message is already settled.
        """
        return False

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if soft:
            super().on_timeout(soft, timeout)
        elif not self.acknowledged:  # else prefork has called on_failure first, which settled it
            logger.error("Hard time limit (%ss) exceeded for %s", timeout, _named(self))
            self.on_failure(_exc_info(TimeLimitExceeded(timeout)))

    def acknowledge(self) -> None:
        """Delete the message, unless it is already settled. Celery calls this to ack."""
        if not self.acknowledged:
            self._settler.settle(RunEnd(End.RETURNED), _NO_ERROR)

    def reject(self, requeue: bool = False) -> None:
        """Reject or requeue the message, unless it is already settled. Celery calls this."""
        self._settler.settle(RunEnd(End.REQUEUED if requeue else End.REJECTED), _NO_ERROR)
        self.send_event("task-rejected", requeue=requeue)

    def _announce_revoked(self, *args: Any) -> None:
        """Settle the message of a revoked or expired task, and let Celery store and report this.

        If the message is hidden instead of deleted, report nothing. Celery reports the revoked task
        when the message comes back.
        """
        settle = self._settler.settle(RunEnd(End.REVOKED), _NO_ERROR)
        with _contained(self):
            if isinstance(settle, Hide):
                state.task_ready(self)
            else:
                super()._announce_revoked(*args)
        self._already_revoked = True


def may_begin(request: Any) -> bool:
    """Return whether the task of a request may begin, now that there is a process for it.

    Since the last check, the worker may have lost the message, or the task's provider may have gone
    down. If the provider is down, hide the message. If the task must not begin for either reason,
    let Celery drop the request.
    """
    lease: Lease = request.lease
    gate, options = lease.gate, lease.options
    may_start = lease.may_start()
    if may_start and gate is not None and options is not None:
        may_start = not gate.keeps_back(lease, options)
    if not may_start:
        forget(request)
    return may_start


def begin_here(request: Any, pid: int, time_accepted: float) -> None:
    """Note that a task begins in this process, or keep it from beginning.

    This replaces ``on_accepted`` of all requests in the pools that run tasks in this process. These
    pools call it just before the task begins. With prefork, the task has already begun in another
    process, so it is too late to prevent that.

    Raises:
        SettledBeforeRun: the task must not begin, because its message is settled, lost, or
            hidden while its provider is down.
    """
    if not may_begin(request):
        request.lease.release()  # lets the keeper forget a lost message, which has no run
        raise SettledBeforeRun("the task does not begin: its message is settled, lost or hidden")
    try:
        type(request).on_accepted(request, pid, time_accepted)
    except Exception as exc:
        if not isinstance(request, BackoffRequest):
            raise
        # The pool would drop the run silently if it got the original error. So settle the message
        # here.
        request.on_failure(_exc_info(exc), ended=RunEnd(End.NOT_BEGUN))
        raise SettledBeforeRun from exc


def forget(request: Request) -> None:
    """Let Celery drop a request that will not run. Else it stays in memory, with its body."""
    if state.requests.get(request.id) is request:
        state.task_ready(request)


def was_handed_to_pool(request: Request) -> bool:
    """Return whether the task of a request runs, or its pool will run it.

    Celery has only a weak reference to the pool's result object. Most pools keep this object until
    the task has ended. The pool threads does not keep it, so there this function returns false
    while the task waits for a thread. That is right, because :func:`begin_here` can still keep the
    task from starting.
    """
    waits = request._apply_result is not None and request._apply_result() is not None
    return waits or request.time_start is not None


# The end of a run that did not return

#: How a run ended, if its process sent no report. The first class that fits the run's error counts.
_ENDS: Final = (
    (Terminated, End.REVOKED),
    (TimeLimitExceeded, End.TIME_LIMIT),
    (WorkerLostError, End.PROCESS_LOST),
    (MemoryError, End.ABORTED),
    (Exception, End.RAISED),
    (BaseException, End.ABORTED),
)


def _read_end(request: Any, exc: BaseException, exc_info: Any) -> tuple[RunEnd, ErrorText]:
    """Return how a run ended, and the parts of its error that may be recorded.

    If the worker has cancelled the run, or stops at once (cold), a crash or a kill counts as
    cancelled. If the worker stops in another way, only a lost process counts as cancelled, because
    supervisors such as dumb-init and systemd also signal the pool's processes.
    """
    report = report_of(exc_info)
    if report is not None:
        ended, error = report.ended, report.error
    else:
        ended = RunEnd(next(end for kind, end in _ENDS if isinstance(exc, kind)))
        if isinstance(exc, TaskPredicate):
            ended = read_end(exc)
        # The user's ``redact`` may be slow, and this code runs in the event loop. So do not call
        # ``redact``. If the task has one, record only the error's type.
        options = request.task.backoff_options
        type_only = options.record_detail == TYPE_ONLY or options.redact is not None
        error = ErrorText.of(exc, traceback=exc_info.traceback, type_only=type_only)
    if ended.decision is None and (ended.end.is_crash or ended.end is End.REVOKED):
        code = state.should_terminate  # True or an exit code, which may be 0
        is_cold = request._cancelling or (code is not None and code is not False)
        if is_cold or (is_stopping() and ended.end is End.PROCESS_LOST):
            return RunEnd(End.CANCELLED), error
    return ended, error


def _raised(exc_info: Any) -> BaseException:
    """Return the exception of a failed run. Some pools wrap it together with its traceback."""
    exc = exc_info.exception
    unwrapped: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return unwrapped


def _failure(exc: BaseException) -> Exception:
    """Return the error of a run, or a ``WorkerLostError`` if Celery cannot store the error.

    Celery before 5.7 stores only subclasses of ``Exception``. Every version raises a
    ``MemoryError`` again instead of storing it.
    """
    if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
        return exc
    return WorkerLostError(f"The run was aborted: {type(exc).__name__}")  # type: ignore[no-any-return]


# Reports that Celery leaves to the task's process, or makes only in newer versions


def _announce_retry(request: BackoffRequest, exc: Any, exc_info: Any, hide: Hide) -> None:
    """Store and announce a retry after a crash, because the task's process has not done it."""
    task, context = request.task, request._context
    if request.store_errors:
        with _contained(request):
            task.backend.mark_as_retry(request.id, exc, exc_info.traceback, request=context)
    with _pushed(request):
        task.on_retry(exc, request.id, request.args, request.kwargs, exc_info)
        reason = Retry(exc=exc, when=int(hide.seconds))
        signals.task_retry.send(sender=task, request=context, reason=reason, einfo=exc_info)


def _call_hooks(request: BackoffRequest, exc: BaseException, exc_info: Any) -> None:
    """Call the task's failure hooks after a hard time limit, as Celery does from 5.7 on."""
    arguments = (request.id, request.args, request.kwargs, exc_info)
    with _pushed(request):
        request.task.on_failure(exc, *arguments)
        request.task.after_return(states.FAILURE, exc, *arguments)


@contextmanager
def _pushed(request: BackoffRequest) -> Iterator[None]:
    """Let the task's hooks find the request in ``self.request``."""
    request.task.request_stack.push(request._context)
    try:
        yield
    finally:
        request.task.request_stack.pop()


def _named(request: BackoffRequest) -> str:
    return f"{printable(request.name)}[{printable(request.id)}]"


@contextmanager
def _contained(request: BackoffRequest) -> Iterator[None]:
    """Log an error of a result backend or hook. Do not raise it, for the message is settled."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001  # Celery's and users' code may raise anything
        logger.error(
            "sqs_backoff.callback_failed: task %s: its message is settled nevertheless; %s",
            _named(request),
            error_site(exc),
            extra={"task_id": request.id},
        )


def _exc_info(exc: BaseException) -> Any:
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()
