"""Statements in autocommit: one that the database did not make is made again.

The database has taken it back because of another (a deadlock, a serialization failure), or its
connection turned out to be dead: it was idle for too long, or the server was restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["make"]

T = TypeVar("T")

#: A statement is made so often at most.
_TRIES = 20

_MYSQL_DEADLOCK = 1213


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
            # Celery closes what is unusable between tasks; a retry within this one should not
            # have to wait for that.
            connection.close_if_unusable_or_obsolete()
            is_dead = was_connected and connection.connection is None
            may_help = (is_dead or _is_conflict(exc)) and not connection.in_atomic_block
            if not may_help or not tries_left:
                raise
    raise AssertionError("unreachable")


def _is_conflict(exc: Exception) -> bool:
    """Whether the database has taken a statement back because of another, so nothing was done."""
    cause = exc.__cause__  # the library's, which knows PostgreSQL's SQLSTATE
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""
    return state.startswith("40") or exc.args[:1] == (_MYSQL_DEADLOCK,)
