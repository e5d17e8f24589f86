"""What can go wrong in the parts that make a retry safe, and what the task makes of it.

::

    SafeError
    ├── TryLater            retried, undoing nothing: the run was cut short, not refused
    │   ├── Busy            somebody else holds the lock; not counted as a retry
    │   ├── StoreUnavailable
    │   └── NotDispatched   a step's task could not be sent; the next run sends it
    ├── Refused             the guard says no; the task ends quietly
    ├── LockLost            the lease was over, or may have been
    ├── StepNotRecorded     the step was done, and nothing says so
    ├── Compensated         the workflow has been taken back
    └── StoreInTransaction  a record would be lost with a rollback

What is not a ``TryLater`` or ``Refused`` is an error like any other: unclassified, so not retried.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Busy",
    "Compensated",
    "LockLost",
    "NotDispatched",
    "Refused",
    "SafeError",
    "StepNotRecorded",
    "StoreInTransaction",
    "StoreUnavailable",
    "TryLater",
]


class SafeError(Exception):
    """Base of all errors of ``celery_sqs_backoff.safe``."""


class TryLater(SafeError):
    """The run cannot go on now. Trying again is safe; what has been done so far stays done."""


class Busy(TryLater):
    """Another run holds the lock."""


class StoreUnavailable(TryLater):
    """The store did not answer; whether the call took effect there is not known."""


class NotDispatched(TryLater):
    """A step is recorded, but the task that confirms it, or takes it back, could not be sent."""


class Refused(SafeError):
    """Another message has passed the guard within its window.

    ``result`` is what the task returns instead of its own result.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return str(self.result["refused"])


class LockLost(SafeError):
    """The lock is no longer this run's, or the store could not say that it is."""


class StepNotRecorded(SafeError):
    """A step has been done, but not recorded: a run that came after would do it again."""


class Compensated(SafeError):
    """The workflow's steps have been taken back; there is nothing to go on with."""


class StoreInTransaction(SafeError):
    """The store's database connection is inside a transaction, with which records would go."""
