"""One run at a time per business object, across processes and machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery.utils.log import get_logger

from ..retry.policies import FullJitter
from ..store.connections import refuse_open_transaction
from ..store.protocol import Store, key_of, seconds_kept
from ..text import error_site
from .errors import Busy, LockLost, StoreUnavailable
from .names import text_of
from .writes import increment, settle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_LEASE_SECONDS", "Lock", "busy_delay", "refuse_lock_in_transaction"]

logger = get_logger(__name__)

#: How long a lock outlives a holder that was killed.
DEFAULT_LEASE_SECONDS = 300.0

_BUSY = FullJitter(base=2, cap=30)

_LONG_SECONDS = 60.0

#: So many waits are short: the holder is probably alive. After so many more it probably is not.
_HOPEFUL = 3
_DOUBTFUL = 3


class Lock:
    """A lock with a lease, and a token that grows with every holder. Not reentrant.

    Arguments:
        store: where the lock is.
        key: of the business object, such as ``"account:7"``: text, an int or a UUID.
        lease: seconds or timedelta above 0, after which the lock is free again whatever its holder
            does. It must be longer than the body takes, or the body must renew it.
        clock: seconds since the epoch.

    The lease alone does not stop a holder that was paused for longer (a suspended machine) and
    wakes up afterwards. If that must be ruled out, pass :attr:`token` to whatever the body writes
    to, and let that refuse a token lower than one it has seen
    (https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html). Tokens grow as
    long as the store keeps its records. After it has lost them, they begin at the clock anew: a
    worker may draw a lower one only if its clock is behind by more than the time for which the
    lock has been in use.

    Raises:
        ValueError: ``lease`` is not above 0, or over 100 years, or ``key`` is empty.
        TypeError: ``key`` is not text, an int or a UUID, or ``lease`` no number and no timedelta.
    """

    def __init__(
        self,
        store: Store,
        key: object,
        *,
        lease: float | timedelta = DEFAULT_LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        name = text_of("lock key", key)
        self._store = store
        self._key = key_of("lock", name)
        self._tokens = key_of("lock-token", name)
        self._lease = seconds_kept("lease", lease)
        self._clock = clock
        #: The lock's record while it is held; empty before.
        self.text = ""
        #: Grows with every holder, and fits into 64 bits; 0 before the lock is taken.
        self.token = 0

    def acquire(self) -> Self:
        """Take the lock, or raise at once: nobody waits in a worker.

        Raises:
            Busy: somebody else holds it.
            StoreUnavailable: the store did not answer; the lock is free when its lease is over.
        """
        nonce = uuid4().hex
        first = self._written(nonce, 0)
        there = self._store.add(self._key, first, self._lease)
        if there not in (None, first):
            raise Busy("The lock is held by another run", self._lease_left(str(there)))
        # From the clock on, as the store forgets a lock that was not taken for long, or loses a
        # write: a counter that began anew would give tokens lower than those seen before.
        token = increment(self._store, self._tokens, start=int(self._clock() * 1000))
        text = self._written(nonce, token)
        # If the lease was over before the token was drawn, the next holder may have drawn a lower
        # one: only who still holds the lock now may use its token.
        if not settle(self._store, self._key, first, text, self._lease):
            raise Busy("The lock's lease was over before it was taken")
        self.text, self.token = text, token
        return self

    def renew(self) -> None:
        """Start the lease anew; a long body calls it before each effect.

        Raises:
            LockLost: the lease was over, or the store could not say that it was not.
        """
        try:
            self.extend()
        except StoreUnavailable as exc:
            raise LockLost("The store did not answer; the lease may be over") from exc

    def extend(self) -> None:
        """Do what :meth:`renew` does, for a body that can be run again from here.

        Raises:
            LockLost: the lease was over.
            StoreUnavailable: the lease may be over.
        """
        text = self._written(self.text.partition(" ")[0], self.token)
        if not settle(self._store, self._key, self.text, text, self._lease):
            raise LockLost(f"{self._why_gone()}; another run may hold the lock")
        self.text = text

    def release(self) -> None:
        """Free the lock. A failure to free it is logged: the body has ended."""
        try:
            # A renewal that the store did not answer may have been written all the same.
            if not self._store.delete(self._key, self.text) and not self.steal(self.text):
                logger.warning("sqs_backoff.lock_outlived: %s", self._why_gone())
        except Exception as exc:  # noqa: BLE001  # the store is away, or a soft time limit has come
            # How the body has ended counts: retried for this, it would be done again.
            logger.warning(
                "sqs_backoff.lock_not_released: it ends with its lease; %s", error_site(exc)
            )

    def steal(self, text: str) -> bool:
        """Free the lock of a holder that shall not go on, by its record; whether it was."""
        there = self._held_as(text)
        return there is not None and self._store.delete(self._key, there)

    def lease_end(self, text: str) -> float | None:
        """When the lease of a holder ends, by its record, in seconds since the epoch.

        ``None``: it has not got the lock any more.
        """
        there = self._held_as(text)
        return None if there is None else _until(there)

    def _held_as(self, text: str) -> str | None:
        nonce = text.partition(" ")[0]
        there = self._store.get(self._key)
        is_held = nonce and there is not None and there.partition(" ")[0] == nonce
        return there if is_held else None

    def _written(self, nonce: str, token: int) -> str:
        return f"{nonce} {token} {self._clock() + self._lease:.3f}"

    def _why_gone(self) -> str:
        if self._lease_left(self.text) > 0:
            return "The lock was freed, or the store has lost it, before its lease was over"
        return "The lease was over"

    def _lease_left(self, text: str) -> float:
        """By the holder's clock; from 0 up to a lease of ours."""
        try:
            until = _until(text)
        except ValueError:  # somebody else's text, on a store that is not signed
            return self._lease
        return min(max(0.0, until - self._clock()), self._lease)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _until(text: str) -> float:
    return float(text.rpartition(" ")[2])


def refuse_lock_in_transaction() -> None:
    """Refuse a lock that would end before what its holder has written can be seen.

    Raises:
        StoreInTransaction: a Django transaction is open in this thread.
    """
    refuse_open_transaction(
        "No lock is taken",
        why="it would end before the commit, and the next holder would not see what this one has"
        " written. Take the lock first, and open the transaction inside its block",
    )


def busy_delay(
    times: int, lease_left: float | None, rng: Any, *, time_left: float = math.inf
) -> float:
    """How many seconds to wait for a lock that another run holds.

    Arguments:
        times: how often this message has found it held, from 1 up.
        lease_left: seconds until the holder's lease ends, if it is not renewed; ``None`` = unknown.
        time_left: seconds within which a run must begin: ``retry_for``. A message that would come
            back after that comes back in between, three times: the holder may be done by then.

    Full jitter over 2, 4, 8 s at first: a holder that is alive ends soon. Then, three times, at
    least half of what is left of the lease, and all of it below 60 s or from then on, so that the
    message of a holder that was killed does not spend the queue's ``maxReceiveCount`` on waiting.
    """
    delay = _BUSY.delay(times, rng)
    is_early = times <= _HOPEFUL + _DOUBTFUL
    if times > _HOPEFUL and lease_left is not None:
        is_hopeful = lease_left > _LONG_SECONDS and is_early
        delay = max(delay, lease_left / 2 if is_hopeful else lease_left)
    return time_left / 2 if is_early and 0 < time_left <= delay else delay
