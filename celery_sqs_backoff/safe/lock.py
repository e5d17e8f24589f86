"""One run at a time per business object, across processes and machines."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from celery.utils.log import get_task_logger

from ..store.connections import refuse_open_transaction
from ..store.protocol import seconds_kept
from ..store.records import Record, Records
from ..text import error_site
from .errors import Busy, HeldByItself, LockLost
from .names import text_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = get_task_logger(__name__)

#: How long a lock outlives a holder that was killed.
DEFAULT_LEASE_SECONDS = 300.0


class Lock:
    """A lock that outlives a killed holder by its lease. No run waits for it in a worker.

    ``exclusive`` and ``workflow`` of one name take the same lock.

    Arguments:
        key: of the business object, such as ``"account:7"``: text, an int or a UUID.
        lease: seconds or timedelta above 0, after which the lock is free whatever its holder does.
        held: names of the locks that the run holds.
    """

    def __init__(
        self,
        records: Records,
        key: object,
        *,
        lease: float | timedelta = DEFAULT_LEASE_SECONDS,
        held: set[str] | None = None,
    ) -> None:
        self._name = text_of("lock key", key)
        self._lease = seconds_kept("lease", lease)
        self._records = records
        self._held: set[str] = set() if held is None else held
        self._holder = uuid4().hex
        self._record: Record | None = None

    def acquire(self) -> Self:
        """Take the lock, or raise without waiting.

        Raises:
            Busy: another run holds it.
            HeldByItself: this run holds it.
            StoreInTransaction: a Django transaction is open: the lock would end before the commit,
                and the next holder would not see this one's writes.
            StoreUnavailable: the store did not answer. The lock is free when the lease is over.
        """
        if self._name in self._held:
            raise HeldByItself(
                f"this run holds the lock {self._name!r} already: pass on what the first 'with' has"
                " given"
            )
        refuse_open_transaction(
            "No lock is taken",
            why="it would end before the commit, and the next holder would not see what this one"
            " has written. Take the lock first, and open the transaction inside its block",
        )
        there = self._records.add("lock", self._name, self._fields(), self._lease)
        if not there.is_new:
            left = float(there.fields["until"]) - time.time()
            raise Busy("another run holds the lock", min(max(0.0, left), self._lease))
        self._record = there
        self._held.add(self._name)
        return self

    def renew(self) -> None:
        """Start the lease again. A body that takes longer than the lease calls it in between.

        Raises:
            LockLost: it was over, and another run may hold the lock.
            StoreUnavailable: the store did not answer.
        """
        new = self._record and self._records.replace(self._record, self._fields(), self._lease)
        if new is None:
            raise LockLost("the lease was over, or the lock was freed by hand")
        self._record = new

    def release(self) -> None:
        """Free the lock. A failure is only logged, because the lease ends too."""
        self._held.discard(self._name)
        record, self._record = self._record, None
        try:
            if record is not None and not self._records.delete(record):
                there = self._records.reread(record)  # a renewal may have been done unanswered
                if there is None or there.fields["holder"] != self._holder:
                    logger.warning("sqs_backoff.lock_outlived: the lease was over before the body")
                else:
                    self._records.delete(there)
        except Exception as exc:  # noqa: BLE001  # the store is away, or a soft time limit has come
            logger.warning("sqs_backoff.lock_not_released: %s", error_site(exc.__cause__ or exc))

    def _fields(self) -> dict[str, object]:
        return {"holder": self._holder, "until": round(time.time() + self._lease, 3)}

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()
