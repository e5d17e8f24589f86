"""Errors of a store, and the base classes of all errors of ``celery_sqs_backoff.safe``.

``safe.errors`` shows the whole tree.
"""

from __future__ import annotations

from ..retry.outcomes import ExplicitOutcome, Outcome, Verdict


class SafeError(ExplicitOutcome):
    """Base class of all errors of ``celery_sqs_backoff.safe``.

    Unless a subclass says otherwise, the outcome is UNKNOWN, and the task is not retried.
    """

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN, so the task is not undone and not retried, and its guard is not released."""
        return Verdict(Outcome.UNKNOWN)


class TryLater(SafeError):
    """The run cannot go on now. Finished steps stay finished."""

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN, but safe to repeat, so the task is retried without undo."""
        return Verdict(Outcome.UNKNOWN, safe_to_repeat=True)


class StoreUnavailable(TryLater):
    """The store did not answer. The call may have taken effect."""


class StoreRefused(StoreUnavailable):
    """The store refuses the call, because a permission, a table or a database is missing.

    Waiting does not help. If this happens at a worker's start, the worker ends. In a running
    worker, the task is retried.
    """


class StoreInTransaction(SafeError):
    """A Django transaction is open.

    The store may use another connection than the transaction. So a rollback would undo either the
    task's work or the store's record, and leave the other. In addition, a lock would be released
    before its holder's writes are committed.
    """


class RecordRejected(SafeError):
    """This project did not write the record (no valid signature), or cannot read or decrypt it."""
