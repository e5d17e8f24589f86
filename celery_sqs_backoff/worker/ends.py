"""How did a run end that did not return? Read from what the pool hands to Celery's request."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import TaskPredicate, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.log import get_logger
from celery.worker import state

from ..retry.decision import End, Ended
from ..retry.options import TYPE_ONLY, Options
from ..sqs.eta import parse_eta
from ..sqs.redact import ErrorText
from ..task.handover import ended_by, report_of
from ..text import error_site, printable
from .results import in_time

logger = get_logger(__name__)

#: Ends in which no code of the task's was left to say what happened.
WITHOUT_THE_TASK: Final = frozenset({End.PROCESS_LOST, End.TIME_LIMIT, End.ABORTED})

#: Attribute of a request: its success, once it has been looked up.
_SUCCESS: Final = "sqs_success"

#: By how much the clocks of SQS and of this machine may differ.
_CLOCKS_DIFFER_SECONDS: Final = 5.0


def is_stopping() -> bool:
    """Return whether Celery is shutting down. Its flags hold True or an exit code, maybe 0."""
    return any(_is_set(code) for code in (state.should_stop, state.should_terminate))


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
        ended = Ended(_end_by(request, exc))
        if isinstance(exc, TaskPredicate):
            ended = ended_by(exc)
        error = _error_of(exc, exc_info.traceback, request.task.backoff_options)
    if ended.word is None:
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


def _end_by(request: Any, exc: BaseException) -> End:
    if isinstance(exc, Terminated):
        return End.REVOKED
    if isinstance(exc, TimeLimitExceeded):
        return End.TIME_LIMIT
    if isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt):
        if request._success_was_stored():
            return End.RETURNED
        return End.PROCESS_LOST if isinstance(exc, WorkerLostError) else End.ABORTED
    if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
        return End.RAISED
    return End.ABORTED


def own_success(request: Any, find: Callable[[], Any] | None) -> Any:
    """Return what is stored of the success of a run whose process was lost; else ``False``.

    Looked up once: a later look, by Celery, must not contradict what has been settled.

    Arguments:
        find: Celery's own look at the result backend; ``None``: it has none.
    """
    if find is None:
        return False
    if request.lease is None:
        return find()
    if _SUCCESS not in vars(request):
        vars(request)[_SUCCESS] = _own_success(request, find)
    return vars(request)[_SUCCESS]


def _own_success(request: Any, find: Callable[[], Any]) -> Any:
    """Another message may have had the same task id, and succeeded.

    Such as an older one, where tasks are sent under an id of their own; or the one that has
    published this one by ``retry()``, and may have ended later. And a part of a chord is counted
    after its result is stored; without it the chord would never end.
    """
    delivery = request.lease.delivery
    sent_at, is_copy = delivery.sent_at, request._request_dict["retries"] > delivery.earlier_runs
    if sent_at is None or is_copy or _is_in_chord(request):
        return False
    try:
        stored = in_time(find)
    except Exception as exc:  # noqa: BLE001  # it hangs, or cannot be made in that thread
        logger.error(
            "sqs_backoff.result_backend_hangs: task %s[%s]: its process was lost; that it may have"
            " succeeded is not known; %s",
            *(printable(request.name), printable(request.id), error_site(exc)),
        )
        return False
    ended_at = _seconds(stored.get("date_done")) if stored else None
    if ended_at is None or ended_at <= sent_at - _CLOCKS_DIFFER_SECONDS:
        return False
    return stored


def _seconds(date_done: object) -> float | None:
    return parse_eta(date_done.isoformat() if isinstance(date_done, datetime) else date_done)


def _is_in_chord(request: Any) -> bool:
    _, _, embed = request._payload
    return bool(embed and embed.get("chord"))


def _error_of(exc: BaseException, traceback: str | None, options: Options) -> ErrorText:
    """Describe what the task's process did not describe itself.

    The user's ``redact`` may take its time, and this process has none: where there is one, only
    the exception's type is kept.
    """
    type_only = options.record_detail == TYPE_ONLY or options.redact is not None
    return ErrorText.of(exc, traceback=traceback, type_only=type_only)
