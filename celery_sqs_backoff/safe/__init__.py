"""Make retries safe with guards, steps, locks, workflows and idempotency keys."""

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
