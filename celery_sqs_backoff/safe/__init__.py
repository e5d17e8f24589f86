"""What makes a retry safe: guard, workflow, lock and idempotency keys, over one kind of store."""

from ..store.protocol import Store
from ..store.urls import open_store
from ..store.vault import Vault
from .errors import (
    AlreadyDone,
    Busy,
    Compensated,
    LockLost,
    NotDispatched,
    OtherInput,
    OutsideRun,
    RecordRejected,
    Refused,
    SafeError,
    StepNotRecorded,
    StoreInTransaction,
    StoreLost,
    StoreUnavailable,
    TryLater,
)
from .guard import Guard
from .lock import Lock
from .task import SafeTask
from .workflow import Workflow

__all__ = [
    "AlreadyDone",
    "Busy",
    "Compensated",
    "Guard",
    "Lock",
    "LockLost",
    "NotDispatched",
    "OtherInput",
    "OutsideRun",
    "RecordRejected",
    "Refused",
    "SafeError",
    "SafeTask",
    "StepNotRecorded",
    "Store",
    "StoreInTransaction",
    "StoreLost",
    "StoreUnavailable",
    "TryLater",
    "Vault",
    "Workflow",
    "open_store",
]
