"""Errors of a store, and the two classes that every error about a safe retry derives from.

``safe.errors`` shows the whole tree.
"""

from __future__ import annotations

from ..retry.outcomes import ExplicitOutcome, Outcome, Verdict


class SafeError(ExplicitOutcome):
    """Base of all errors of ``celery_sqs_backoff.safe``: UNKNOWN, and not retried."""

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN, so there is no undo, no release of a guard and no retry."""
        return Verdict(Outcome.UNKNOWN)


class TryLater(SafeError):
    """The run cannot go on now. Finished steps stay finished."""

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN, but safe to repeat, so retried without undo."""
        return Verdict(Outcome.UNKNOWN, safe_to_repeat=True)


class StoreUnavailable(TryLater):
    """The store did not answer. The call may have taken effect."""


class StoreRefused(StoreUnavailable):
    """The store refuses the call, for the lack of a right, a table or a database.

    Waiting does not help. A worker that is told so at its start ends; one that is running retries.
    """


class StoreInTransaction(SafeError):
    """A Django transaction is open, and its rollback would part a record from its work.

    And a lock would end before what its holder has written is committed.
    """


class RecordRejected(SafeError):
    """A record's signature is missing or wrong, so this project did not write it."""
