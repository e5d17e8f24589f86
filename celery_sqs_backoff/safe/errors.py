"""What can go wrong in the parts that make a retry safe, and what the task makes of it.

::

    SafeError
    ├── TryLater              the run was cut short: retried, and nothing is undone
    │   ├── Busy              another run holds the lock; not counted as a retry
    │   ├── StoreUnavailable
    │   └── NotDispatched     a step's task could not be sent; the next run sends it
    ├── Refused               another message passed the guard; the task ends quietly
    │   └── AlreadyDone       this message has done it; its result is on record
    ├── OtherInput            the record under this key was made with another input
    ├── RecordRejected        the record was not written by this project
    ├── LockLost              the lease ended, or may have ended
    ├── StoreLost             the store went away in the middle of a run
    ├── StepNotRecorded       the step was done, but not recorded
    ├── Compensated           the workflow has been taken back
    ├── StoreInTransaction    a rollback would take the record with it, or leave it alone
    └── OutsideRun            nothing says whose record this would be

Each has a fixed verdict. It is asked before ``classify`` and ``retry_on``, so
``autoretry_for=(Exception,)`` does not turn "the step was done, but not recorded" into a retry. A
``TryLater`` is safe to repeat. All others are UNKNOWN and not retried.
"""

from __future__ import annotations

from typing import Any

from ..store.errors import (
    RecordRejected,
    SafeError,
    StoreInTransaction,
    StoreUnavailable,
    TryLater,
)

__all__ = [
    "AlreadyDone",
    "Busy",
    "Compensated",
    "LockLost",
    "NotDispatched",
    "OtherInput",
    "OutsideRun",
    "RecordRejected",
    "Refused",
    "SafeError",
    "StepNotRecorded",
    "StoreInTransaction",
    "StoreLost",
    "StoreUnavailable",
    "TryLater",
]


class Busy(TryLater):
    """Another run holds the lock.

    ``lease_left`` is how many seconds the holder's lease has left; ``None`` = not known.
    """

    lease_left: float | None = None

    def __init__(self, message: str = "", lease_left: float | None = None) -> None:
        super().__init__(message)
        self.lease_left = lease_left


class NotDispatched(TryLater):
    """A step is recorded, but the task that confirms it, or takes it back, could not be sent."""


class Refused(SafeError):
    """Another message has passed the guard within its window.

    ``result`` is what is stored as the task's result.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return str(self.result["refused"])


class AlreadyDone(Refused):
    """A run of this very message has ended well; ``result`` is what it returned.

    ``has_result`` is false if that could not be kept: JSON could not hold it, or it was too large.
    If something waits for it, the rest of a chain, a callback or a chord, the message is a dead
    letter.
    """

    def __init__(self, passage: Any) -> None:
        Exception.__init__(self, "this message is done")
        self.has_result: bool = passage.has_result
        kept = {"refused": "this message is done; its result could not be kept"}
        self.result = passage.result if passage.has_result else kept

    def __str__(self) -> str:
        return "this message is done" + ("" if self.has_result else "; its result was not kept")


class OtherInput(SafeError):
    """The record under this key was made with another input: same key, other input."""


class LockLost(SafeError):
    """The lock is no longer this run's, or the store could not say that it is."""


class StoreLost(SafeError):
    """The store answered before the run, and not in the middle of it.

    What the run has done in between would be done again, so it is not retried.
    """


class StepNotRecorded(SafeError):
    """A step has been done, but not recorded: a later run would do it again."""


class Compensated(SafeError):
    """The workflow's steps have been taken back; there is nothing to go on with."""


class OutsideRun(SafeError):
    """No task is running and no ``scope`` is given, so nothing says whose record this would be."""
