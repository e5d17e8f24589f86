"""Where records are kept that must outlive a run: four atomic primitives, which every store gives.

All else (guard, steps, workflow, lock, keys, crash counter) is built above these.
"""

from __future__ import annotations

import json
from datetime import timedelta
from hashlib import sha256
from typing import Protocol, runtime_checkable
from uuid import uuid4

from ..retry.policies import to_seconds
from .errors import StoreUnavailable

__all__ = [
    "KEEP_SECONDS",
    "MARK",
    "Store",
    "add_or_mark",
    "ask_to_write",
    "increment",
    "key_of",
    "number",
    "seconds_kept",
    "settle",
]

#: How long records are kept that have no window or lease of their own: 30 days. SQS keeps a
#: message for 14 days at the most, and the dead-letter queue after it as long again.
KEEP_SECONDS = 30 * 24 * 3600.0

#: Longest time for which a record may be kept, in days: every store can add it to its clock.
_MAX_DAYS = 36_500

#: Stands before a value that was marked.
MARK = "+"

#: Somebody else's record comes and goes while we look at it: try again, so often.
_TRIES = 10


@runtime_checkable
class Store(Protocol):
    """Records, text by key, each with an end. All four are atomic, and durable when they return.

    ``ttl`` is seconds above 0. A record whose end has come is not there, for any of them. Keys and
    values are compared exactly: case, accents and trailing spaces count.

    Raises:
        StoreUnavailable: the store did not answer. The call may have taken effect nevertheless.
    """

    def add(self, key: str, value: str, ttl: float) -> str | None:
        """Create a record if there is none: ``None``. Else change nothing, return its value."""

    def get(self, key: str) -> str | None:
        """Return the value, or ``None``."""

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        """Put ``new`` in place of ``old``; ``False`` if ``old`` is not there.

        The record gets a new end; ``ttl=None`` keeps the one that it has.
        """

    def delete(self, key: str, old: str) -> bool:
        """Delete the record; ``False`` if its value is not ``old``, or it is not there."""


def seconds_kept(name: str, value: float | timedelta) -> float:
    """Return the seconds, above 0, for which a record is to be kept.

    Arguments:
        name: the argument's name, for the error.
        value: seconds or timedelta, up to 100 years.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is 0 or less, or too long.
    """
    seconds = to_seconds(name, value, may_be_zero=False)
    if seconds > timedelta(days=_MAX_DAYS).total_seconds():
        raise ValueError(f"invalid {name} {value!r}: expected up to {_MAX_DAYS} days")
    return seconds


def key_of(kind: str, *parts: object) -> str:
    """Return the key of a record: its kind, and a hash of what it is about. Never ambiguous."""
    # As JSON, so that ("a:b", "c") and ("a", "b:c") differ.
    text = json.dumps([str(part) for part in parts], ensure_ascii=True)
    return f"{kind}:{sha256(text.encode()).hexdigest()}"


def ask_to_write(store: Store) -> None:
    """Find out whether the store takes changes. It makes none that lasts.

    A replica, or a full server, answers reads and refuses writes. To delete what is not there is a
    write for most stores; one for which it is not may have a method of this name.

    Raises:
        StoreUnavailable: it does not.
    """
    own = getattr(store, "ask_to_write", None)
    if own is not None:
        own()
    else:
        store.delete(key_of("check", "to write"), "")


def settle(store: Store, key: str, old: str, new: str, ttl: float | None) -> bool:
    """Replace, and believe a second look: a client library may have sent a call twice.

    For values that nobody else writes, else the second look may see somebody else's.
    """
    return store.replace(key, old, new, ttl) or store.get(key) == new


def add_or_mark(store: Store, key: str, value: str, ttl: float, part: str) -> str | None:
    """Create a record if there is none: ``None``. Else mark it if it holds ``part``; return it.

    Two calls on a store of the four methods. A store may have a method of this name (and these
    arguments after ``store``) that does it in one.

    Raises:
        StoreUnavailable: the record comes and goes.
    """
    in_one_call = getattr(store, "add_or_mark", None)
    if in_one_call is not None:
        there: str | None = in_one_call(key, value, ttl, part)
        return there
    for _ in range(_TRIES):
        there = store.add(key, value, ttl)
        if there in (None, value) or there.startswith(MARK) or part not in there:
            return there
        if settle(store, key, there, MARK + there, None):
            return MARK + there
    raise StoreUnavailable("The record comes and goes")


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
