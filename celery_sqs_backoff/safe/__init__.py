"""What makes a retry safe: guard, steps, lock and idempotency keys, over one kind of store."""

from .errors import (
    Busy,
    Compensated,
    LockLost,
    NotDispatched,
    Refused,
    SafeError,
    StepNotRecorded,
    StoreInTransaction,
    StoreUnavailable,
    TryLater,
)
from .guard import Guard
from .lock import Lock
from .store import Store
from .stores import open_store, store_of
from .task import SafeTask

__all__ = [
    "Busy",
    "Compensated",
    "Guard",
    "Lock",
    "LockLost",
    "NotDispatched",
    "Refused",
    "SafeError",
    "SafeTask",
    "StepNotRecorded",
    "Store",
    "StoreInTransaction",
    "StoreUnavailable",
    "TryLater",
    "open_store",
    "store_of",
]
