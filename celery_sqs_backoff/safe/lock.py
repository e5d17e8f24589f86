"""One run at a time per business object, across processes and machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

from celery.utils.log import get_logger

from .errors import Busy, LockLost, SafeError, StoreUnavailable
from .store import Store, increment, key_of, settle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_LEASE_SECONDS", "Lock"]

logger = get_logger(__name__)

#: How long a lock outlives a holder that was killed.
DEFAULT_LEASE_SECONDS = 300.0


class Lock:
    """A lock with a lease, and a token that grows with every holder. Not reentrant.

    Arguments:
        store: where the lock is.
        key: of the business object, such as ``"account:7"``.
        lease: seconds above 0, after which the lock is free again whatever its holder does. To be
            longer than the body lasts, or renewed by it.
        clock: seconds since the epoch.

    The lease alone does not keep a holder that was stopped for longer (a paused machine) from going
    on afterwards. Who must rule that out hands :attr:`token` to what the body writes to, and lets
    that refuse a token lower than one it has seen
    (https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).

    Raises:
        ValueError: ``lease`` is not above 0.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        lease: float = DEFAULT_LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not lease > 0:
            raise ValueError(f"lease={lease!r} is not legal: it must be seconds above 0")
        self._store = store
        self._key = key_of("lock", key)
        self._tokens = key_of("lock-token", key)
        self._lease = lease
        self._clock = clock
        self._value = ""
        #: Grows with every holder, and fits into 64 bits; 0 before the lock is taken.
        self.token = 0

    def acquire(self) -> Self:
        """Take the lock, or raise at once: nobody waits in a worker.

        Raises:
            Busy: somebody else holds it.
            StoreUnavailable: the store did not answer; the lock is free when its lease is over.
        """
        nonce = uuid4().hex
        if self._store.add(self._key, nonce, self._lease) not in (None, nonce):
            raise Busy("The lock is held by another run")
        # From the clock on, as the store forgets a lock that was not taken for long, or loses a
        # write: a counter that began anew would give tokens lower than those seen before.
        token = increment(self._store, self._tokens, start=int(self._clock() * 1000))
        value = f"{nonce} {token}"
        # If the lease was over before the token was drawn, the next holder may have drawn a lower
        # one: only who still holds the lock now may use its token.
        if not settle(self._store, self._key, nonce, value, self._lease):
            raise Busy("The lock's lease was over before it was taken")
        self._value, self.token = value, token
        return self

    def renew(self) -> None:
        """Let the lease begin anew; to be called by a long body, before an effect.

        Raises:
            LockLost: the lease was over, or the store could not say that it was not.
        """
        try:
            is_held = settle(self._store, self._key, self._value, self._value, self._lease)
        except StoreUnavailable as exc:
            raise LockLost("The store did not answer; the lease may be over") from exc
        if not is_held:
            raise LockLost("The lease was over; another run may hold the lock")

    def release(self) -> None:
        """Free the lock. That it could not be, or was lost, is logged: the body has ended."""
        try:
            if not self._store.delete(self._key, self._value):
                logger.warning("sqs_backoff.lock_outlived: the body took longer than its lease")
        except SafeError as exc:  # it is away, or the body has left a transaction open
            logger.warning("sqs_backoff.lock_not_released: it ends with its lease (%s)", exc)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
