"""Errors of guards, steps, locks and workflows. Each says whether its task is retried.

::

    SafeError
    ├── TryLater              the run cannot go on now; the task is retried
    │   ├── Busy              another run holds the lock
    │   ├── StoreUnavailable  the store did not answer
    │   │   └── StoreRefused  a permission, a table or a database is missing
    │   └── NotDispatched     the confirm or undo task of a step could not be sent
    ├── Refused               another message passed the guard; this message ends without a failure
    │   └── AlreadyDone       an earlier run of this message has succeeded
    ├── OtherInput            the step under this name was begun with other arguments
    ├── RecordRejected        this project did not write the record, or cannot read it
    ├── LockLost              another run may hold the lock
    ├── HeldByItself          this run already holds the lock
    ├── StepNotRecorded       the step was done, but not recorded
    ├── NotUndone             a guard refused the undo task, so the step was not undone
    ├── Compensated           the workflow's steps were undone, or are being undone
    ├── StoreInTransaction    a Django transaction is open; a rollback may undo only work or record
    └── OutsideRun            the task runs without a message that could own the record

The task's ``classify`` and ``retry_on`` are not asked about these errors. For example,
``autoretry_for=(Exception,)`` causes no retry after ``StepNotRecorded``, because a retry would do
the step again. All errors have the outcome UNKNOWN (the work may have been done), so
``on_not_processed`` is not called. Only ``TryLater`` leads to a retry. The retry is safe, because
finished steps are not done again.
"""

from __future__ import annotations

from typing import Any

from ..store.errors import SafeError, TryLater
from ..task.extension import Answered


class Busy(TryLater):
    """Another run holds the lock.

    Arguments:
        lease_left: seconds until the lease of the lock's holder ends. The retry does not wait
            longer than this. ``None`` (default) = not known.
    """

    def __init__(self, message: str = "", lease_left: float | None = None) -> None:
        super().__init__(message)
        self.retry_before = lease_left


class NotDispatched(TryLater):
    """A step is recorded, but its ``confirm`` or ``undo`` task could not be sent."""


class Refused(SafeError, Answered):
    """Another message has passed the guard within its window.

    Arguments:
        result: Celery stores it as the task's result.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return str(self.result["refused"])


class AlreadyDone(Refused):
    """An earlier run of this message has succeeded.

    ``has_result`` is false if the result of that run is not recorded, for example because it was
    not JSON or was too large. In that case, if a chain, a callback or a chord waits for the result,
    the message becomes a dead letter.
    """

    def __init__(self, result: Any, *, has_result: bool) -> None:
        lost = {"refused": "this message is done; its result could not be kept"}
        Exception.__init__(self, "this message is done")
        self.result = result if has_result else lost
        self.has_result, self.is_done = has_result, True

    def __str__(self) -> str:
        return "this message is done" + ("" if self.has_result else "; its result was not kept")


class OtherInput(SafeError):
    """The step under this name was begun with other arguments."""


class LockLost(SafeError):
    """The lock's lease has ended, or another run has continued the workflow."""


class HeldByItself(SafeError):
    """This run already holds the lock. Pass on the object that the first ``with`` returned."""


class StepNotRecorded(SafeError):
    """A step has been done, but not recorded, so a later run would do it again."""


class NotUndone(SafeError):
    """A guard has refused the task that undoes a step, so the step was not undone."""


class Compensated(SafeError):
    """The workflow's steps were undone or are being undone, so the workflow cannot go on."""


class OutsideRun(SafeError):
    """The task runs without a message and without ``scope=``, so a record would have no owner."""
