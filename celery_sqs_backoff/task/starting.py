"""What happens before a task's own code: STARTED is stored, and ``before_start`` is called."""

from __future__ import annotations

import os
from functools import wraps
from inspect import getattr_static
from typing import Any

from celery import Task, states
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_task_logger

from ..store.errors import TryLater
from ..text import error_site, printable
from .failed_run import FailedRun
from .handover import begun_run_of
from .refused import ignores_result

logger = get_task_logger(__name__)


class SlowStart(TryLater):
    """The soft time limit, which comes only once, came before the task's own code was called."""


def prepare_start(cls: Any) -> None:
    """Let us store STARTED (``task_track_started``) in place of Celery, and judge ``before_start``.

    All versions: a task that cannot be shown as started fails, for good, without having run; while
    a result backend is away that empties the queue.
    """
    if cls.track_started:
        cls.track_started, cls.stores_started = False, True
    elif "track_started" in vars(cls) and "stores_started" not in vars(cls):
        cls.stores_started = False  # its own word, whatever the task that it is derived from does
    if cls.stores_started or cls.before_start is not Task.before_start:
        _wrap_before_start(cls)


def _wrap_before_start(cls: Any) -> None:
    """Store STARTED first; judge what the task's own hook raises as what its ``run`` raises.

    Where Celery stores it: a run that it leaves out as done already (its setting
    ``worker_deduplicate_successful_tasks``) must not be shown as started.
    """
    hook = getattr_static(cls, "before_start")
    if getattr(hook, "_is_wrapped", False):
        return

    @wraps(hook)
    def wrapped(self: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        begun_run_of(self.request)
        try:
            if self.stores_started and not self.request.is_eager:
                _store_started(self, task_id)
            return member_of(self, hook)(task_id, args, kwargs)
        except BaseException as exc:
            instead = FailedRun(self, exc, args, kwargs).instead()
            if instead is None:
                raise
            raise instead from exc

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    cls.before_start = wrapped


def _store_started(task: Any, task_id: str) -> None:
    """Store it as Celery would; that it cannot be stored is logged, and changes nothing."""
    request = task.request
    if ignores_result(task, request):
        return
    try:
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(task_id, meta, states.STARTED, request=request)
    except SoftTimeLimitExceeded:
        raise SlowStart("the result backend took longer than the soft time limit") from None
    except Exception as exc:  # noqa: BLE001  # a backend's client may raise anything
        logger.error(
            "sqs_backoff.start_not_stored: task %s[%s] runs all the same; %s",
            printable(task.name),
            printable(task_id),
            error_site(exc),
            extra={"task_name": task.name, "task_id": task_id},
        )


def member_of(task: Any, given: Any) -> Any:
    """Return what a class defines as the task has it, bound where it is a method.

    Arguments:
        given: as it stands in the class (``inspect.getattr_static``).
    """
    bind = getattr(given, "__get__", None)
    return given if bind is None else bind(task, type(task))
