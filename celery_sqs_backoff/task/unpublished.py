"""A ``Retry`` that no message stands for: neither a copy, nor the one that is hidden.

A task that is called as a function raises it, for its ``retry()`` has no message to publish; or the
task's code raises one by hand. Celery takes it for a copy on its way, and acknowledges the message.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery.exceptions import Retry, TaskPredicate

from .handover import BackoffRetry


def is_unpublished(exc: BaseException) -> bool:
    """Whether it is such a retry."""
    return isinstance(exc, Retry) and exc.sig is None and not isinstance(exc, BackoffRetry)


def retried_for(task: Any, word: Retry) -> Exception | None:
    """Return what the task's ``retry()`` raises for such a word: a retry, or why there is none.

    ``None`` where the task overrides ``retry()``, which may have published a copy its own way.
    """
    if type(task).retry is not task._base_retry:
        return None
    cause = word.exc or word.__cause__ or word.__context__
    if not isinstance(cause, Exception) or isinstance(cause, TaskPredicate):
        cause = None
    when = {"eta" if isinstance(word.when, datetime) else "countdown": word.when}
    try:
        task.retry(exc=cause, **when)
    except Exception as asked:  # noqa: BLE001  # Retry, Reject, or the failure itself
        return asked
    return None
