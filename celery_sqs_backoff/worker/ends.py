"""How did a run end that did not return? Read from what the pool hands to Celery's request."""

from __future__ import annotations

from typing import Any, Final

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import TaskPredicate, Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state

from ..retry.decision import End, Ended
from ..retry.options import TYPE_ONLY, Options
from ..sqs.redact import ErrorText
from ..task.handover import ended_by, report_of

#: Ends in which no code of the task's was left to say what happened.
WITHOUT_THE_TASK: Final = frozenset({End.PROCESS_LOST, End.TIME_LIMIT, End.ABORTED})


def is_stopping() -> bool:
    """Return whether Celery is shutting down. Its flags hold True or an exit code, maybe 0."""
    return _is_set(state.should_stop) or _is_set(state.should_terminate)


def _is_set(code: object) -> bool:
    return code is not None and code is not False


def read_end(request: Any, exc_info: Any, *, is_cancelling: bool) -> tuple[Ended, ErrorText]:
    """Return how a run ended, and the parts of its error that may be recorded.

    A process that is lost while the worker stops is no crash: supervisors signal the whole process
    group (dumb-init), or all processes of a service (systemd).

    Arguments:
        request: Celery's, of the run.
        exc_info: what the pool reported.
        is_cancelling: the worker ends this run itself: a cold shutdown, or a lost connection.
    """
    exc, report = raised(exc_info), report_of(exc_info)
    if report is not None:
        ended, error = report.ended, report.error
    else:
        ended = Ended(_end_by(exc))
        if isinstance(exc, TaskPredicate):
            ended = ended_by(exc)
        error = _error_of(exc, exc_info.traceback, request.task.backoff_options)
    if ended.decision is None:
        was_ended = ended.end in WITHOUT_THE_TASK or isinstance(exc, Terminated)
        is_cold = is_cancelling or _is_set(state.should_terminate)
        if (is_cold and was_ended) or (is_stopping() and ended.end is End.PROCESS_LOST):
            return Ended(End.CANCELLED), error
    return ended, error


def raised(exc_info: Any) -> BaseException:
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
    """Describe what the task's process did not describe itself.

    The user's ``redact`` may take its time, and this process has none: where there is one, only
    the exception's type is kept.
    """
    type_only = options.record_detail == TYPE_ONLY or options.redact is not None
    return ErrorText.of(exc, traceback=traceback, type_only=type_only)
