"""Statements in autocommit: one that the database did not make is made again.

The database has taken it back because of another (a deadlock, a serialization failure), or its
connection turned out to be dead (idle for too long, the server was restarted), or to lead to a
server that has become a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .commit import is_in_transaction
from .errors import StoreInTransaction

__all__ = ["make"]

T = TypeVar("T")

#: A statement is made so often at most.
_TRIES = 20

_MYSQL_DEADLOCK = 1213

#: "Server has gone away", "lost connection" (older PyMySQL opens a new one when it is pinged), and
#: two for "read-only".
_MYSQL_LOST = ((2006,), (2013,), (1290,), (1836,))

_POSTGRESQL_READ_ONLY = "25006"


def make(using: str, statement: Callable[[], T], *, refusal: str) -> T:
    """Return what a statement returns. Made again, it may have taken effect before.

    In the transaction around a test of Django's ``TestCase`` it is made once: that is over as a
    whole.

    Arguments:
        using: alias of its database.
        refusal: says what to do where a transaction is open, which could take it back.

    Raises:
        StoreInTransaction: one is.
        django.db.DatabaseError, django.db.InterfaceError: it failed for another reason, or each
            time.
    """
    from django.db import (  # type: ignore[import-untyped]
        DatabaseError,
        InterfaceError,
        connections,
    )

    connection = connections[using]
    may_be_lost = connection.connection is not None  # it was opened for an earlier one
    if is_in_transaction(connection):
        raise StoreInTransaction(refusal)
    for tries_left in reversed(range(_TRIES)):
        try:
            return statement()
        except (DatabaseError, InterfaceError) as exc:
            if connection.in_atomic_block:
                raise
            # Celery closes what is unusable between tasks; the rest of this one needs it too.
            if is_lost := _is_lost(connection, exc):
                connection.close()
            may_help = _is_conflict(exc) or (is_lost and may_be_lost)
            if not may_help or not tries_left:
                raise
            if is_lost:
                may_be_lost = False
                connection.set_autocommit(True)  # as it was, whatever ``DATABASES`` says
    raise AssertionError("unreachable")


def _is_lost(connection: Any, exc: Exception) -> bool:
    """Whether only another connection may reach a server that makes the statement."""
    return (
        connection.connection is None
        or exc.args[:1] in _MYSQL_LOST
        or _sqlstate(exc) == _POSTGRESQL_READ_ONLY
        or not connection.is_usable()
    )


def _is_conflict(exc: Exception) -> bool:
    """Whether the database has taken a statement back because of another, so nothing was done."""
    return _sqlstate(exc).startswith("40") or exc.args[:1] == (_MYSQL_DEADLOCK,)


def _sqlstate(exc: Exception) -> str:
    cause = exc.__cause__  # the library's, which knows PostgreSQL's
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""
