"""A result that cannot be stored is missing; a run that succeeded, or retries, has not failed.

All versions: Celery takes what the result backend raises for the task's failure. It calls
``on_failure`` and ``link_error``, which may undo what has been done, and stores FAILURE if the
backend is back by then: a database that restarts, a connection that is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery.utils.log import get_task_logger
from kombu.exceptions import EncodeError

from ..text import error_site, printable
from .handover import RUNNING

__all__ = ["keep_ends", "log_failed_later"]

logger = get_task_logger(__name__)


def keep_ends(backend: Any) -> None:
    """Contain what a backend raises when it stores a success or a retry. Does nothing twice.

    Not where a chord waits for the result, nor for a result that nothing can store: Celery makes a
    failure of that.
    """
    for name in ("mark_as_done", "mark_as_retry"):
        store = getattr(backend, name)
        if not getattr(store, "_is_wrapped", False):
            setattr(backend, name, _contained(store))


def _contained(store: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(store)
    def stored(task_id: str, *args: Any, **kwargs: Any) -> Any:
        run = RUNNING.get()
        try:
            return store(task_id, *args, **kwargs)
        except EncodeError:
            raise
        except Exception as exc:
            request = kwargs.get("request", args[1] if len(args) > 1 else None)
            if run is None or run.report is None or getattr(request, "chord", None):
                raise
            log_failed_later(getattr(request, "task", None), task_id, exc)
            return None

    stored._is_wrapped = True  # type: ignore[attr-defined]
    return stored


def log_failed_later(task: object, task_id: str, exc: BaseException) -> None:
    """Log what failed after the run. No text of the exception: it may quote the task's arguments.

    Arguments:
        task: its name.
        task_id: the message's.
    """
    name = printable(task)
    logger.error(
        "sqs_backoff.after_run_failed: task %s[%s]: what had been decided stands; %s",
        name,
        printable(task_id),
        error_site(exc),
        extra={"task_name": name, "task_id": task_id},
    )
