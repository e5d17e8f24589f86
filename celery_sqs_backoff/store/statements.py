"""Statements in autocommit: one that the database did not make is made again.

The database has taken it back because of another (a deadlock, a serialization failure), or its
connection was of no use: it was idle for too long, or the server was restarted, or only reads since
a failover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .connections import is_in_transaction
from .errors import StoreInTransaction

T = TypeVar("T")

#: A statement is made so often at most.
_TRIES = 20

# SQLSTATEs, and numbers of MySQL's and MariaDB's errors.
_CONFLICT: set[object] = {"40001", "40P01", 1213}
_READ_ONLY: set[object] = {"25006", 1290, 1792, 1836}
_LOST: set[object] = {2006, 2013}  # pinged, older PyMySQL opens a new one


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
    was_open = connection.connection is not None
    if is_in_transaction(connection):
        raise StoreInTransaction(refusal)
    for tries_left in reversed(range(_TRIES)):
        try:
            return statement()
        except (DatabaseError, InterfaceError) as exc:
            if connection.in_atomic_block:
                raise
            is_open = connection.connection is not None
            is_useless = not is_open or _is(exc, _READ_ONLY | _LOST) or not connection.is_usable()
            is_old = was_open or (is_open and _is_pooled(connection))
            if is_useless:
                # Celery does so between tasks; the rest of this one should not have to wait for
                # that. A new one may lead to the server that took over.
                _close(connection)
            if not tries_left or not (_is(exc, _CONFLICT) or (is_useless and is_old)):
                raise
            if is_useless:
                was_open = False
                connection.set_autocommit(True)  # as it was, whatever ``DATABASES`` says
    raise AssertionError("unreachable")


def _is_pooled(connection: Any) -> bool:
    """Whether it is of a pool (``OPTIONS["pool"]``): not new, and perhaps as useless as the last.

    Oracle's looks at its connections itself before it hands one out.
    """
    return connection.vendor == "postgresql" and bool(getattr(connection, "pool", None))


def _close(connection: Any) -> None:
    if connection.connection is not None and _is_pooled(connection):
        connection.connection.close()  # else the pool would hand it out again
    connection.close()


def _is(exc: Exception, codes: set[object]) -> bool:
    cause = exc.__cause__  # the library's, which knows the SQLSTATE
    named = (getattr(cause, name, None) for name in ("sqlstate", "pgcode"))
    return not codes.isdisjoint((*named, *exc.args[:1]))
