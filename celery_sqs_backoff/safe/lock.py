"""Let one run at a time work on a business object, across processes and machines."""

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

#: Default seconds after which a lock is free, even if its holder has not freed it.
DEFAULT_LEASE_SECONDS = 300.0


class Lock:
    """A lock with a lease, after which it is free even if its holder was killed.

    A run that finds the lock taken does not wait. Its task is retried. ``self.exclusive()`` and
    ``self.workflow()`` of the same name take the same lock.

    Arguments:
        key: key of the business object, such as ``"account:7"``: text, an int or a UUID.
        lease: seconds or timedelta above 0, after which the lock is free even if its holder is
            still running.
        held: names of the locks that the run holds. The lock adds and removes its own name.
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
            Busy: another run holds the lock.
            HeldByItself: this run already holds the lock.
            StoreInTransaction: a Django transaction is open. The lock would end with its block,
                before the commit, and the next holder would not see the writes of this run.
            StoreUnavailable: the store did not answer. If it has recorded the lock, the lock stays
                taken until its lease ends.
        """
        if self._name in self._held:
            raise HeldByItself(
                f"this run already holds the lock {self._name!r}: pass on the object that the first"
                " 'with' returned"
            )
        refuse_open_transaction(
            "No lock is taken",
            why="the lock would end before the commit, and the next holder would not see the writes"
            " of this run. Take the lock first, and open the transaction inside its block",
        )
        there = self._records.add("lock", self._name, self._fields(), self._lease)
        if not there.is_new:
            left = float(there.fields["until"]) - time.time()
            raise Busy("another run holds the lock", min(max(0.0, left), self._lease))
        self._record = there
        self._held.add(self._name)
        return self

    def renew(self) -> None:
        """Start the lease again. Call this method in a block that may take longer than the lease.

        Raises:
            LockLost: the lease had ended, or an operator had freed the lock. Another run may hold
                the lock.
            StoreUnavailable: the store did not answer.
        """
        new = self._record and self._records.replace(self._record, self._fields(), self._lease)
        if new is None:
            raise LockLost("the lease has ended, or an operator has freed the lock")
        self._record = new

    def release(self) -> None:
        """Free the lock. A failure is only logged, because the lock is free when its lease ends."""
        self._held.discard(self._name)
        record, self._record = self._record, None
        try:
            if record is not None and not self._records.delete(record):
                # The record in the store also differs if ``renew`` has written it, but the store's
                # answer was lost.
                there = self._records.reread(record)
                if there is None or there.fields["holder"] != self._holder:
                    logger.warning(
                        "sqs_backoff.lock_outlived: a lock's lease ended before its block, so"
                        " another run may have entered: choose a longer lease"
                    )
                else:
                    self._records.delete(there)
        except Exception as exc:  # noqa: BLE001  # the store is down, or a soft time limit was hit
            logger.warning("sqs_backoff.lock_not_released: %s", error_site(exc.__cause__ or exc))

    def _fields(self) -> dict[str, object]:
        return {"holder": self._holder, "until": round(time.time() + self._lease, 3)}

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()
