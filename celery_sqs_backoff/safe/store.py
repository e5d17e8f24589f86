"""Where records are kept that must outlive a run: four atomic primitives, which every store gives.

All else (guard, steps, lock, keys, crash counter) is built above these.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Protocol, runtime_checkable
from uuid import uuid4

__all__ = ["KEEP_SECONDS", "MAX_KEY_LENGTH", "Store", "increment", "key_of", "number", "settle"]

#: How long records are kept that have no window or lease of their own: 30 days. SQS keeps a
#: message for 14 days at the most, and the dead-letter queue after it as long again.
KEEP_SECONDS = 30 * 24 * 3600.0

#: Longer keys are hashed. 255 is what a Django primary key holds on every database.
MAX_KEY_LENGTH = 200


@runtime_checkable
class Store(Protocol):
    """Records, text by key, each with an end. All four are atomic, and durable when they return.

    ``ttl`` is seconds above 0. A record whose end has come is not there, for any of them.

    Raises:
        StoreUnavailable: the store did not answer. The call may have taken effect nevertheless.
    """

    def add(self, key: str, value: str, ttl: float) -> str | None:
        """Create a record if there is none: ``None``. Else change nothing, return its value."""

    def get(self, key: str) -> str | None:
        """Return the value, or ``None``."""

    def replace(self, key: str, old: str, new: str, ttl: float) -> bool:
        """Put ``new`` in place of ``old``, with a new end; ``False`` if ``old`` is not there."""

    def delete(self, key: str, old: str) -> bool:
        """Delete the record; ``False`` if its value is not ``old``, or it is not there."""


def key_of(kind: str, *parts: object) -> str:
    """Return the key of a record: readable if it is short, hashed if not, never ambiguous."""
    # As JSON, so that ("a:b", "c") and ("a", "b:c") differ.
    key = f"{kind}:{json.dumps([str(part) for part in parts], ensure_ascii=True)}"
    if len(key) > MAX_KEY_LENGTH:
        key = f"{kind}:{sha256(key.encode()).hexdigest()}"
    return key


def settle(store: Store, key: str, old: str, new: str, ttl: float) -> bool:
    """Replace, and believe a second look: a client library may have sent a call twice.

    For values that nobody else writes, else the second look may see somebody else's.
    """
    return store.replace(key, old, new, ttl) or store.get(key) == new


def increment(store: Store, key: str, *, start: int = 0, ttl: float = KEEP_SECONDS) -> int:
    """Add 1 to a counter, which is at ``start`` at least; return the new number.

    No two get the same, and each is higher than those before it.

    Each number is written with a nonce of its writer's, so that a call that was sent twice is
    told from somebody else's.
    """
    while True:
        first = _numbered(start + 1)
        old = store.add(key, first, ttl)
        if old is None or old == first:
            return start + 1
        new = _numbered(max(_number(old), start) + 1)
        if settle(store, key, old, new, ttl):
            return _number(new)


def number(store: Store, key: str, *, start: int = 0) -> int:
    """Read a counter of :func:`increment`."""
    value = store.get(key)
    return start if value is None else _number(value)


def _numbered(value: int) -> str:
    return f"{value} {uuid4().hex}"


def _number(value: str) -> int:
    return int(value.partition(" ")[0])
