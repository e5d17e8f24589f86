"""What happens before a task's own code: STARTED is stored, and ``before_start`` is called."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from celery import Task, states
from celery.app.task import Context
from celery.utils.log import get_task_logger

from ..text import error_site, printable
from .failed_run import FailedRun

__all__ = ["prepare_start", "store_started"]

logger = get_task_logger(__name__)


def prepare_start(cls: Any) -> None:
    """Let us store STARTED (``task_track_started``) in place of Celery, and judge ``before_start``.

    All versions: a task that cannot be shown as started fails, for good, without having run; while
    a result backend is away that empties the queue.
    """
    if cls.track_started:
        cls.track_started, cls.stores_started = False, True
    _wrap_before_start(cls)


def _wrap_before_start(cls: Any) -> None:
    """Judge what the task's own ``before_start`` raises as what its ``run`` raises."""
    hook = cls.before_start
    if hook is Task.before_start or getattr(hook, "_is_wrapped", False):
        return

    @wraps(hook)
    def wrapped(self: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        try:
            return hook(self, task_id, args, kwargs)
        except BaseException as exc:
            instead = FailedRun(self, exc, args, kwargs).instead()
            if instead is None:
                raise
            raise instead from exc

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    cls.before_start = wrapped


def store_started(task: Any, task_id: str, request: Any) -> None:
    """Store it as Celery would; that it cannot be stored is logged, and changes nothing."""
    context = Context(request or {})
    ignores = context.ignore_result
    if task.ignore_result if ignores is None else ignores:
        return
    try:
        meta = {"pid": os.getpid(), "hostname": context.hostname}
        task.backend.store_result(task_id, meta, states.STARTED, request=context)
    except Exception as exc:  # noqa: BLE001  # a backend's client may raise anything
        logger.error(
            "sqs_backoff.start_not_stored: task %s[%s] runs all the same; %s",
            printable(task.name),
            printable(task_id),
            error_site(exc),
            extra={"task_name": task.name, "task_id": task_id},
        )
