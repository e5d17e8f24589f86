"""What crosses between the process that runs a task and the worker's main process.

The main process gives the :class:`Delivery` along with the request; the tracer takes it out again
before Celery sees it. Back comes a :class:`Report`: how the run ended, the task's word, and what
may be said of the failure. It is an attribute of Celery's ``ExceptionInfo``, because of what
happens in the one process only what Celery pickles reaches the other.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Reject, Retry, TaskPredicate

from ..retry.decision import End, Ended, RetryIn
from ..retry.options import TYPE_ONLY, Options
from ..sqs.delivery import Delivery
from ..sqs.redact import ErrorText

#: Where a request carries the :class:`Delivery` on its way to the tracer.
DELIVERY_KEY = "sqs_delivery"

_NO_ERROR = ErrorText()


class BackoffRetry(Retry):  # type: ignore[misc]  # Celery is not typed
    """Ask the worker to hide the message for ``when`` seconds. Nothing has been published.

    It has no fields of its own: ``Retry.__reduce__`` would drop them on the way.
    """


class NamedRetry(BackoffRetry):
    """One whose delay the task has named. Only the run's report says so in the main process."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended, as the process that ran the task says it. Plain values only."""

    ended: Ended
    error: ErrorText = _NO_ERROR


class Run:
    """A run that is under way in this process, for a message from SQS."""

    __slots__ = (
        "delivery",
        "has_begun",
        "is_followed",
        "report",
        "task_id",
    )

    def __init__(self, task_id: str, delivery: Delivery) -> None:
        self.task_id = task_id
        self.delivery = delivery
        #: Whether the task's own code was called.
        self.has_begun = False
        #: Whether callbacks or the rest of a chain are to be sent once it has returned.
        self.is_followed = False
        #: What the run has said about its end; ``None`` until then.
        self.report: Report | None = None


#: Of this thread, greenlet or coroutine.
RUNNING: ContextVar[Run | None] = ContextVar("celery_sqs_backoff_run", default=None)


def run_of(request: Any) -> Run | None:
    """Return the run behind a task request, or ``None``: another broker, eager, or a plain call."""
    run = RUNNING.get()
    if run is None or request.id != run.task_id or request.called_directly or request.is_eager:
        return None
    return run


def begun_run_of(request: Any) -> Run | None:
    """As :func:`run_of`, when the task's own code is about to be called: note the run's id.

    Not in what the tracer makes the request of: Celery would take it for a custom header.
    """
    run = run_of(request)
    if run is not None:
        request.sqs_run_id = run.delivery.run_id
    return run


def delivery_of(request: Any) -> Delivery | None:
    """Return the SQS message behind a task request, or ``None``: see :func:`run_of`."""
    run = run_of(request)
    return None if run is None else run.delivery


def describe(exc: BaseException, options: Options, *, with_traceback: bool = True) -> ErrorText:
    """Say what a dead-letter record may say of an exception, in the process that ran the task."""
    type_only = options.record_detail == TYPE_ONLY
    return ErrorText.of(
        exc, type_only=type_only, redact=options.redact, with_traceback=with_traceback
    )


def ended_by(exc: TaskPredicate) -> Ended:
    """Say how a run ended that raised one of Celery's own words."""
    if isinstance(exc, BackoffRetry):
        word = RetryIn(exc.when, is_named=isinstance(exc, NamedRetry))
        return Ended(End.RETRY_ASKED, word)
    if isinstance(exc, Retry):
        return Ended(End.RETRY_ASKED)
    if isinstance(exc, Reject):
        return Ended(End.REQUEUED if exc.requeue else End.REJECTED)
    return Ended(End.IGNORED)


def attach_report(exc_info: Any, report: Report) -> None:
    """Let the report travel with Celery's ``ExceptionInfo``."""
    exc_info.sqs_report = report


def report_of(exc_info: Any) -> Report | None:
    """Read the report, or ``None``: the run ended without one."""
    report = getattr(exc_info, "sqs_report", None)
    return report if isinstance(report, Report) else None
