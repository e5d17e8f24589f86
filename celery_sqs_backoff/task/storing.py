"""A result that cannot be stored is missing; a run that succeeded, or retries, has not failed.

All versions: Celery takes what the result backend raises for the task's failure. It calls
``on_failure`` and ``link_error``, which may undo what has been done, and stores FAILURE if the
backend is back by then: a database that restarts, a connection that is closed.

A backend that works may refuse a result for ever: one of more than 64 KB on MySQL, of 400 KB on
DynamoDB. Whoever waits for it is told so: its state is FAILURE, with the name of what the backend
has raised.

Nor has a run failed that has not begun: with ``worker_deduplicate_successful_tasks`` Celery looks
first whether a message that was received before has succeeded. While the backend is away that would
make a dead letter of each message that is retried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from celery import states
from celery.exceptions import BackendGetMetaError, BackendStoreError, SoftTimeLimitExceeded
from celery.utils.log import get_task_logger
from kombu.exceptions import EncodeError

from ..text import error_site, printable
from .handover import RUNNING

logger = get_task_logger(__name__)


def keep_ends(backend: Any) -> None:
    """Contain what a backend raises when it stores a success or a retry. Does nothing twice.

    Not of a success that a chord waits for, nor of one that cannot be encoded: Celery makes a
    failure of that. Also what it raises when Celery looks for a success before a run.
    """
    if not getattr(backend.mark_as_done, "_is_wrapped", False):
        backend.mark_as_done = _contained_success(backend, backend.mark_as_done)
        backend.mark_as_retry = _contained_retry(backend.mark_as_retry)
        backend.get_task_meta = _contained_look(backend.get_task_meta)


def _contained_success(backend: Any, store: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(store)
    def mark_as_done(
        task_id: str, result: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            store(task_id, result, request, *args, **kwargs)
        except EncodeError:
            raise
        except Exception as exc:
            if not _is_ended() or getattr(request, "chord", None):
                raise
            log_failed_later(getattr(request, "task", None), task_id, exc)
            if not isinstance(exc, SoftTimeLimitExceeded):  # another attempt may take as long
                _store_again(backend, task_id, result, request)

    mark_as_done._is_wrapped = True  # type: ignore[attr-defined]
    return mark_as_done


def _store_again(backend: Any, task_id: str, result: Any, request: Any) -> None:
    """Store a success, or, if a backend that takes something small refuses it, that it does."""
    with suppress(Exception):  # the backend is away, and that has been logged
        backend.store_result(task_id, None, states.STARTED, request=request)
        try:
            backend.store_result(task_id, result, states.SUCCESS, request=request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # noqa: BLE001  # a backend's client may raise anything
            # Not the exception itself: it may hold what was too large.
            refused = BackendStoreError(f"The result is refused: {type(exc).__name__}")
            backend.store_result(task_id, refused, states.FAILURE, request=request)


def _contained_retry(store: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(store)
    def mark_as_retry(task_id: str, *args: Any, **kwargs: Any) -> None:
        try:
            store(task_id, *args, **kwargs)
        except Exception as exc:
            if not _is_ended():
                raise
            log_failed_later(getattr(kwargs.get("request"), "task", None), task_id, exc)

    return mark_as_retry


def _contained_look(look: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(look)
    def get_task_meta(task_id: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return look(task_id, *args, **kwargs)
        except SoftTimeLimitExceeded:
            raise  # it comes only once: the run would have none
        except Exception as exc:
            run = RUNNING.get()
            if run is None or run.has_begun or run.task_id != task_id:
                raise
            raise BackendGetMetaError(task_id=task_id) from exc  # which Celery passes over

    return get_task_meta


def _is_ended() -> bool:
    """Whether the run of a message in this process has said how it ended."""
    run = RUNNING.get()
    return run is not None and run.report is not None


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
