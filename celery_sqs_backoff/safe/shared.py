"""The counts that all workers share, where the app names a store; 0 where it does not.

A store that does not answer is no reason to lose a message: it is logged, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.utils.log import get_task_logger

from . import counts
from .errors import SafeError
from .store import Store
from .stores import has_store, store_of

__all__ = ["busy_receives", "count_busy", "count_crash"]

logger = get_task_logger(__name__)


def count_crash(app: Any, message_id: str) -> int:
    """Count a run of the message that ended with its process; return how many did anywhere."""
    return _ask(app, counts.count_crash, message_id)


def count_busy(app: Any, message_id: str) -> int:
    """Count a run of the message that found a lock held; return how many did anywhere."""
    return _ask(app, counts.count_busy, message_id)


def busy_receives(app: Any, message_id: str) -> int:
    """Return how many receives of the message led to a run that found a lock held: no retries."""
    return _ask(app, counts.busy, message_id)


def _ask(app: Any, count: Callable[[Store, str], int], message_id: str) -> int:
    if not has_store(app):
        return 0
    try:
        return count(store_of(app), message_id)
    except SafeError:  # it is away, or the task has left a transaction open
        logger.exception("sqs_backoff.not_counted")
        return 0
