"""What is counted per message across all workers: runs lost, in doubt, or that found a lock held.

Budgets are counted by SQS message id: a message that a person has redriven gets them anew. A doubt
is kept by task name and task id: what a run may have done is not undone by sending its message
again.
"""

from __future__ import annotations

from ..store.protocol import Store, key_of
from .writes import increment, number

__all__ = ["busy", "count_busy", "count_crash", "count_doubt", "doubts"]


def count_crash(store: Store, message_id: str, task_name: str, task_id: str) -> int:
    """Count a run that ended with its process, and return how many there have been.

    Raises:
        StoreUnavailable: it may have been counted.
    """
    count_doubt(store, task_name, task_id)
    return increment(store, key_of("crashes", message_id))


def count_doubt(store: Store, task_name: str, task_id: str) -> int:
    """Count a run that may have done the work, and return how many there have been.

    Raises:
        StoreUnavailable: it may have been counted.
    """
    return increment(store, key_of("doubts", task_name, task_id))


def doubts(store: Store, task_name: str, task_id: str) -> int:
    """Return how many runs may have done the work: they were lost, or in doubt.

    Raises:
        StoreUnavailable: nobody knows.
    """
    return number(store, key_of("doubts", task_name, task_id))


def count_busy(store: Store, message_id: str) -> int:
    """Count a run that found a lock held, and return how many there have been.

    Raises:
        StoreUnavailable: it may have been counted.
    """
    return increment(store, key_of("busy", message_id))


def busy(store: Store, message_id: str) -> int:
    """Return how many runs of the message found a lock held: receives that are no retries.

    Raises:
        StoreUnavailable: nobody knows.
    """
    return number(store, key_of("busy", message_id))
