"""The counts that all workers share, where the app names a store; 0 where it does not.

A store that does not answer is no reason to lose a message: it is logged, nothing is counted, and
what is asked for is ``None``: not known.
Nor may it stop a worker: Celery's event loop makes these calls by :func:`in_time`. A store that
hangs is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_task_logger

from ..store.connections import ask_and_close
from ..store.settings import vault_of
from ..store.urls import has_store
from ..text import error_site
from ..threads import call_in_time
from . import counts
from .guard import Run
from .message_end import TakenBack, compensate_scopes_of

__all__ = [
    "busy_receives",
    "compensate_given_up",
    "count_busy",
    "count_crash",
    "count_doubt",
    "in_time",
    "is_in_doubt",
]

logger = get_task_logger(__name__)

T = TypeVar("T")

#: A store that takes so long to fail hangs; and how long it is not asked then.
_HANGS_SECONDS = 1.0
_LEFT_ALONE_SECONDS = 30.0

#: The longest that Celery's event loop waits for a store.
_WAIT_SECONDS = 3.0

#: Attribute of an app whose store hangs: until when it is left alone, by the monotonic clock.
_LEFT_ALONE_UNTIL = "_sqs_backoff_store_left_alone_until"

#: Attribute of an app: the last call that was not waited for to its end.
_HANGING = "_sqs_backoff_store_hanging"


def in_time(app: Any, ask: Callable[[], T], *, otherwise: T) -> T:
    """Return what ``ask`` returns, or ``otherwise`` if that takes too long. Raises what it raises.

    It is called in another thread, because no client library can be relied on for its
    timeouts. What takes too long goes on there; until it ends, the store is left alone. If the
    machine has no thread left, it is not asked at all.
    """
    if not has_store(app):
        return ask()
    if _is_left_alone(app):
        return otherwise
    began = time.monotonic()
    asked = call_in_time(partial(ask_and_close, ask), seconds=_WAIT_SECONDS)
    if asked is None:
        logger.warning("sqs_backoff.no_thread_left: the store is not asked")
        return otherwise
    if asked.done():
        return asked.result()
    setattr(app, _HANGING, asked)
    _note_failure(app, began)
    return otherwise


def count_crash(app: Any, message_id: str, task_name: str, task_id: str) -> int:
    """Count a run of the message that ended with its process; return how many did anywhere."""
    return _ask(app, counts.count_crash, message_id, task_name, task_id) or 0


def count_busy(app: Any, message_id: str) -> int:
    """Count a run of the message that found a lock held; return how many did anywhere."""
    return _ask(app, counts.count_busy, message_id) or 0


def count_doubt(app: Any, task_name: str, task_id: str) -> None:
    """Count a run of the message that may have done the work."""
    _ask(app, counts.count_doubt, task_name, task_id)


def is_in_doubt(app: Any, task_name: str, task_id: str) -> bool | None:
    """Whether an earlier run of the message was lost, or may have done the work."""
    doubts = _ask(app, counts.doubts, task_name, task_id)
    return None if doubts is None else doubts > 0


def busy_receives(app: Any, message_id: str) -> int | None:
    """Return how many receives of the message led to a run that found a lock held: no retries."""
    return _ask(app, counts.busy, message_id)


def compensate_given_up(app: Any, task_name: str, task_id: str, *, lost_run: str = "") -> bool:
    """Take back the workflows of a message that the main process gives up; whether that is done.

    Arguments:
        lost_run: id of a run of it that is known to have ended, with its process.

    Blocks while the store is asked, once for a message that was never in a workflow. Never raises.
    """
    if not has_store(app):
        return True
    if _is_left_alone(app):
        return False
    try:
        vault = vault_of(app)
    except ImproperlyConfigured as exc:  # then no run of it has entered a workflow either
        logger.error("sqs_backoff.not_counted: %s", error_site(exc))
        return True
    run = Run.of(vault, task_name, task_id, lost_run or "given up")
    began = time.monotonic()
    taken_back = compensate_scopes_of(vault, app, run)
    if taken_back is TakenBack.UNREACHED:
        _note_failure(app, began)
    return taken_back is TakenBack.DONE


def _ask(app: Any, count: Callable[..., int], *message: str) -> int | None:
    if not has_store(app):
        return 0
    if _is_left_alone(app):
        return None
    began = time.monotonic()
    try:
        return count(vault_of(app), *message)
    except Exception as exc:  # noqa: BLE001  # away, planted, or whatever a user's store raises
        # The message's end is being decided, in the worker's main process too: it goes on.
        logger.error("sqs_backoff.not_counted: %s", error_site(exc.__cause__ or exc))
        _note_failure(app, began)
        return None


def _is_left_alone(app: Any) -> bool:
    until: float = vars(app).get(_LEFT_ALONE_UNTIL, 0.0)
    hanging: Future[Any] | None = vars(app).get(_HANGING)
    return time.monotonic() < until or (hanging is not None and not hanging.done())


def _note_failure(app: Any, began: float) -> None:
    """Leave the store alone if its failure, of a call that began then, has taken long."""
    now = time.monotonic()
    if now - began >= _HANGS_SECONDS:
        setattr(app, _LEFT_ALONE_UNTIL, now + _LEFT_ALONE_SECONDS)
        logger.warning(
            "sqs_backoff.store_hangs: for %.0f s the store has not answered, or the broker has not"
            " taken undoing tasks; for %.0f s no crash is counted in the store, and no workflow is"
            " taken back",
            now - began,
            _LEFT_ALONE_SECONDS,
        )
