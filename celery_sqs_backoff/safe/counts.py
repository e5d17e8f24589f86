"""What is counted per message across all workers: runs lost, in doubt, or that found a lock held.

By SQS message id, not by task id: a message that a person has redriven gets its budget anew.
"""

from __future__ import annotations

from .store import Store, increment, key_of, number

__all__ = ["busy", "count_busy", "count_crash", "count_doubt", "doubts"]


def count_crash(store: Store, message_id: str) -> int:
    """Count a run that ended with its process, and return how many there have been.

    Raises:
        StoreUnavailable: it may have been counted.
    """
    return increment(store, key_of("crashes", message_id))


def count_doubt(store: Store, message_id: str) -> int:
    """Count a run that may have done the work, and return how many there have been.

    Raises:
        StoreUnavailable: it may have been counted.
    """
    return increment(store, key_of("doubts", message_id))


def doubts(store: Store, message_id: str) -> int:
    """Return how many runs were in doubt, or else how many were lost: they may have done the work.

    Raises:
        StoreUnavailable: nobody knows.
    """
    return number(store, key_of("doubts", message_id)) or number(
        store, key_of("crashes", message_id)
    )


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
