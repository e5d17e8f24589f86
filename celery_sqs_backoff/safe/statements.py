"""Statements in autocommit: one that the database did not make is made again.

The database has taken it back because of another (a deadlock, a serialization failure), or its
connection was of no use: it was idle for too long, or the server was restarted, or only reads since
a failover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["make"]

T = TypeVar("T")

#: A statement is made so often at most.
_TRIES = 20

# SQLSTATEs, and numbers of MySQL's and MariaDB's errors.
_CONFLICT: set[object] = {"40001", "40P01", 1213}
_READ_ONLY: set[object] = {"25006", 1290, 1792, 1836}


def make(using: str, statement: Callable[[], T]) -> T:
    """Return what a statement returns. Made again, it may have taken effect before.

    Inside a transaction it is made once: that is over as a whole.

    Arguments:
        using: alias of its database.

    Raises:
        django.db.DatabaseError, django.db.InterfaceError: it failed for another reason, or each
            time.
    """
    from django.db import (  # type: ignore[import-untyped]
        DatabaseError,
        InterfaceError,
        connections,
    )

    connection = connections[using]
    for tries_left in reversed(range(_TRIES)):
        was_connected = connection.connection is not None
        try:
            return statement()
        except (DatabaseError, InterfaceError) as exc:
            if connection.in_atomic_block or not tries_left:
                raise
            if _is(exc, _READ_ONLY):
                connection.close()  # the address may lead to the server that took over
            else:
                # Celery closes what is unusable between tasks; a retry within this one should not
                # have to wait for that.
                connection.close_if_unusable_or_obsolete()
            was_useless = was_connected and connection.connection is None
            if not was_useless and not _is(exc, _CONFLICT):
                raise
    raise AssertionError("unreachable")


def _is(exc: Exception, codes: set[object]) -> bool:
    cause = exc.__cause__  # the library's, which knows the SQLSTATE
    named = (getattr(cause, name, None) for name in ("sqlstate", "pgcode"))
    return not codes.isdisjoint((*named, *exc.args[:1]))
