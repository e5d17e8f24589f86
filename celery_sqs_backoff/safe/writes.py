"""What is written into a store in more than one call."""

from __future__ import annotations

from uuid import uuid4

from ..store.errors import StoreUnavailable
from ..store.protocol import KEEP_SECONDS, Store, key_of

#: Stands before a value that was marked.
MARK = "+"

#: How often to try again when others keep changing the record.
_TRIES = 10


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

    Raises:
        StoreUnavailable: others changed the record each time.
    """
    for _ in range(_TRIES):
        there = store.add(key, value, ttl)
        if there is None or there == value or there.startswith(MARK) or part not in there:
            return there
        if settle(store, key, there, MARK + there, None):
            return MARK + there
    raise StoreUnavailable("gave up after 10 conflicting writes by other runs")


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
