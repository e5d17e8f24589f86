"""Protect the work of a task that SQS delivers again, or that is retried.

* A guard lets one message per key run within a time window.
* A step is a call that later runs skip once its result is recorded.
* A lock lets one run at a time work on a business object.
* A workflow is a series of steps under a lock. If the worker gives the message up, the steps are
  undone.
* An idempotency key is a UUID by which a provider recognises a repeated call.
"""

from ..store.errors import (
    RecordRejected,
    SafeError,
    StoreInTransaction,
    StoreUnavailable,
    TryLater,
)
from .errors import (
    AlreadyDone,
    Busy,
    Compensated,
    HeldByItself,
    LockLost,
    NotDispatched,
    NotUndone,
    OtherInput,
    OutsideRun,
    Refused,
    StepNotRecorded,
)
from .guard import Guard

__all__ = [
    "AlreadyDone",
    "Busy",
    "Compensated",
    "Guard",
    "HeldByItself",
    "LockLost",
    "NotDispatched",
    "NotUndone",
    "OtherInput",
    "OutsideRun",
    "RecordRejected",
    "Refused",
    "SafeError",
    "StepNotRecorded",
    "StoreInTransaction",
    "StoreUnavailable",
    "TryLater",
]
