"""The values that pass between the process that runs a task and the worker's main process.

The main process adds a :class:`Delivery`, the facts about the SQS message, to the request. In the
task's process, ``run.wrap_trace`` removes it before Celery sees the request. After the run, that
process returns a :class:`Report` of how the run ended. The report is an attribute of Celery's
``ExceptionInfo``, because Celery pickles only that part of a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from uuid import uuid4

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate, WorkerLostError
from kombu.utils.encoding import safe_repr

from ..retry.budget import GiveUpReason
from ..retry.decision import End, Hide, RunEnd
from ..sqs.delivery import Delivery
from ..sqs.redact import ErrorText

#: The key of a request under which the main process sends the :class:`Delivery`.
DELIVERY_KEY = "sqs_delivery"

#: Highest number of characters of a failure's text and traceback that are sent to the main process.
#: The main process needs both only for Celery's events. The result backend has the full texts.
_MAX_REPR_CHARACTERS: Final = 1_000
_MAX_TRACEBACK_CHARACTERS: Final = 6_000

_NO_ERROR = ErrorText()


class BackoffRetry(Retry):  # type: ignore[misc]  # Celery is not typed
    """Raised to ask the worker to hide the message for ``when`` seconds. No copy was published.

    It has no fields of its own, because ``Retry.__reduce__`` would drop them.
    """


class FailedInPool(Exception):
    """Replaces a task's exception in the main process. It has the ``repr`` of the original."""

    def __repr__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended. The process that ran the task sends it to the main process, pickled."""

    ended: RunEnd
    error: ErrorText = _NO_ERROR


@dataclass(frozen=True, slots=True)
class Asked:
    """The exception that ``self.retry()`` raised, and why.

    Attributes:
        raised: the exception.
        cause: the error that the retry is for, or ``None``.
        reason: the budget that allowed no retry, or ``None`` if the message is retried.
        is_named: whether the task set the delay itself, by ``countdown`` or ``eta``.
    """

    raised: BaseException
    cause: BaseException | None
    reason: GiveUpReason | None = None
    is_named: bool = False


class Run:
    """Facts about one run of a task, in the process that runs it.

    In a worker, the object is not an attribute of Celery's request. Celery would take the attribute
    for a custom header and copy it to the messages that the task sends.

    Attributes:
        task_id: Celery's ID of the task.
        task: the task, once its own code is called.
        delivery: facts about the SQS message, or ``None`` on another broker and in an eager task.
        has_begun: whether the task's own code was called.
        is_running: whether the task's own code is running now.
        is_awaited: whether callbacks, the rest of a chain or a chord still wait for the run's
            success.
        arguments: the arguments of the task's own code: a tuple and a dict.
        asked: the last exception of ``self.retry()`` and its reason, or ``None``.
        copy: the ``Retry`` for a copy of the message that the run has published, or ``None``.
        report: how the run ended, or ``None`` while it runs.
        is_known: whether a rule of the task has classified the run's failure.
        extension_state: an object in which the task's :class:`Extension` keeps facts of its own.
    """

    task: Any = None
    has_begun = is_running = is_known = False
    arguments: Sequence[Any] = ((), {})
    asked: Asked | None = None
    copy: Retry | None = None
    report: Report | None = None
    extension_state: Any = None

    def __init__(self, task_id: str, delivery: Delivery | None, is_awaited: bool = False) -> None:
        self.task_id, self.delivery, self.is_awaited = task_id, delivery, is_awaited

    @cached_property
    def id(self) -> str:
        """ID of the run, different for each receive of the message."""
        return uuid4().hex if self.delivery is None else self.delivery.run_id

    def get_asked(self, raised: BaseException) -> Asked | None:
        """Return the facts about ``self.retry()`` if it raised this exception, else ``None``."""
        return self.asked if self.asked is not None and self.asked.raised is raised else None


#: The run that is under way in this thread, greenlet or coroutine.
RUNNING: ContextVar[Run | None] = ContextVar("celery_sqs_backoff_run", default=None)


def run_of(request: Any) -> Run | None:
    """Return the run of a task's request, or ``None`` if the request is not running here.

    For example, the request is not running here if the task was called as a function, or if the
    main process calls a hook of the task.
    """
    # An eager task may run inside a task with the same ID, as after ``Task.replace``. So an eager
    # request has its own attribute for its run.
    if request.is_eager:
        run: Run | None = getattr(request, "sqs_run", None)
    else:
        run = RUNNING.get()
    if run is None or request.id != run.task_id or request.called_directly:
        return None
    return run


def begin_elsewhere(request: Any) -> Run:
    """Return a new run for a request that does not come from SQS."""
    run = Run(request.id, None)
    if request.is_eager:
        request.sqs_run = run
    return run


def read_end(exc: TaskPredicate, *, is_named: bool = False) -> RunEnd:
    """Return how a run ended, from the ``Retry``, ``Reject`` or ``Ignore`` that it raised.

    Arguments:
        is_named: whether the task set the delay of a retry itself.
    """
    if isinstance(exc, BackoffRetry):
        return RunEnd(End.RETRY_ASKED, Hide(exc.when, is_named=is_named))
    if isinstance(exc, Retry):
        return RunEnd(End.RETRY_ASKED)
    if isinstance(exc, Reject):
        return RunEnd(End.REQUEUED if exc.requeue else End.REJECTED)
    return RunEnd(End.IGNORED)


def pack(exc: BaseException, report: Report, *, traceback: str, internal: bool) -> Any:
    """Return a small ``ExceptionInfo`` with the report, without frames or the exception's own data.

    This function does not change Celery's ``ExceptionInfo``, because a hook of the task may still
    refer to it. This can happen in pools that run tasks in the worker's process.
    """
    info = ExceptionInfo.__new__(ExceptionInfo)
    info.exception = _stand_in(exc)
    info.type = type(info.exception)
    info.traceback = traceback[-_MAX_TRACEBACK_CHARACTERS:]
    info.internal = internal
    info.sqs_report = report
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


def report_of(exc_info: Any) -> Report | None:
    """Return the report of a run, or ``None`` if it ended without one."""
    report = getattr(exc_info, "sqs_report", None)
    return report if isinstance(report, Report) else None
