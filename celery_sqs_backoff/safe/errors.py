"""Errors of the parts that make a retry safe, and what each means for the message.

::

    SafeError
    ├── TryLater              the run was cut short: retried without undo
    │   ├── Busy              another run holds the lock
    │   ├── StoreUnavailable
    │   └── NotDispatched     a step's task could not be sent; the next run sends it
    ├── Refused               another message passed the guard; the task ends quietly
    │   └── AlreadyDone       this message has done it; its result is on record
    ├── OtherInput            the step under this name was begun with other arguments
    ├── RecordRejected        this project did not write the record
    ├── LockLost              another run may hold the lock
    ├── HeldByItself          this run holds the lock already
    ├── StepNotRecorded       the step was done, but not recorded
    ├── NotUndone             a guard refused a step's undo, so the step stands
    ├── Compensated           the workflow's steps were taken back
    ├── StoreInTransaction    a rollback would take the record with it
    └── OutsideRun            no message owns the record

Each has a fixed verdict. It is asked before ``classify`` and ``retry_on``, so
``autoretry_for=(Exception,)`` does not turn "the step was done, but not recorded" into a retry. A
``TryLater`` is safe to repeat. All others are UNKNOWN and not retried.
"""

from __future__ import annotations

from typing import Any

from ..store.errors import SafeError, TryLater
from ..task.extension import Answered


class Busy(TryLater):
    """Another run holds the lock.

    Arguments:
        lease_left: seconds until the holder's lease ends. The message comes back no later.
    """

    def __init__(self, message: str = "", lease_left: float | None = None) -> None:
        super().__init__(message)
        self.retry_before = lease_left


class NotDispatched(TryLater):
    """A step is recorded, but the task that confirms it, or takes it back, could not be sent."""


class Refused(SafeError, Answered):
    """Another message has passed the guard within its window.

    Arguments:
        result: is stored as the task's result.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return str(self.result["refused"])


class AlreadyDone(Refused):
    """A run of this very message has ended well.

    ``has_result`` is false if its result could not be kept: it was no JSON, or too large. If a
    chain, a callback or a chord waits for it, the message is a dead letter.
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
    """The lease was over, or another run has gone on with the workflow."""


class HeldByItself(SafeError):
    """This run holds the lock already. Pass on what ``with`` has given."""


class StepNotRecorded(SafeError):
    """A step has been done, but not recorded, so a later run would do it again."""


class NotUndone(SafeError):
    """A guard has refused the task that undoes a step, so the step stands."""


class Compensated(SafeError):
    """The workflow's steps have been taken back, so it cannot go on."""


class OutsideRun(SafeError):
    """No message of this task is running and no ``scope`` is given."""
