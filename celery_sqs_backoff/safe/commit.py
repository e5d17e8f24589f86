"""Nothing is sent before the data that it is about is committed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from .errors import StoreInTransaction

__all__ = [
    "after_commit",
    "ask_and_close",
    "is_in_transaction",
    "open_connections",
    "open_transactions",
    "refuse_manual_transaction",
    "refuse_open_transaction",
]

T = TypeVar("T")


def after_commit(send: Callable[[], object], *, committed: tuple[str, ...] = ()) -> None:
    """Call ``send`` once no Django transaction is open on any of this thread's connections.

    Runs immediately outside a transaction; never after a rollback. In a test, when Django's
    ``captureOnCommitCallbacks`` runs the hooks: the transaction of its ``TestCase`` never ends.

    Arguments:
        committed: database aliases whose hooks are being run.

    Raises:
        django.db.transaction.TransactionManagementError: autocommit is off, outside ``atomic()``:
            Django runs no hooks then.
    """
    refuse_manual_transaction()
    for connection in open_connections():
        alias = connection.alias
        is_open = connection.in_atomic_block or not connection.get_autocommit()
        if alias in committed or not (is_in_transaction(connection) if committed else is_open):
            continue
        from django.db import transaction  # type: ignore[import-untyped]

        # Another connection may be in a transaction too.
        again = partial(after_commit, send, committed=(*committed, alias))
        transaction.on_commit(again, using=alias)
        return
    send()


def open_transactions() -> list[str]:
    """Return the database aliases on which this thread has a transaction open.

    The transaction around a test of Django's ``TestCase`` does not count.
    """
    return [c.alias for c in open_connections() if is_in_transaction(c)]


def refuse_manual_transaction() -> None:
    """Refuse what is to be done after a commit that Django will not tell of.

    Raises:
        django.db.transaction.TransactionManagementError: autocommit is off, outside ``atomic()``.
    """
    for connection in open_connections():
        if not connection.in_atomic_block and not connection.get_autocommit():
            from django.db import transaction

            raise transaction.TransactionManagementError(
                "Nothing can be sent after the commit: autocommit is off for the database alias"
                f" {connection.alias!r}, outside atomic(), where Django runs no hooks"
            )


def refuse_open_transaction(what: str, *, why: str) -> None:
    """Refuse what would not go together with the end of a transaction.

    Raises:
        StoreInTransaction: a Django transaction is open in this thread.
    """
    for connection in open_connections():
        if is_in_transaction(connection):
            there = f"inside a transaction of the database alias {connection.alias!r}"
            if not connection.in_atomic_block:  # the next begins by itself
                there = f"while autocommit is off for the database alias {connection.alias!r}"
            raise StoreInTransaction(f"{what} {there}: {why}")


def is_in_transaction(connection: Any) -> bool:
    """Whether what is done on a connection now may still be rolled back.

    The transaction that Django's ``TestCase`` wraps around each test does not count.
    """
    if blocks := connection.atomic_blocks:
        return any(not getattr(block, "_from_testcase", False) for block in blocks)
    return not connection.get_autocommit()


def ask_and_close(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns, in a thread whose next call may be to another service.

    Django's connections of this thread are closed then.
    """
    try:
        return ask()
    finally:
        for connection in open_connections():
            connection.close()


def open_connections() -> Iterator[Any]:
    """Django's open connections of this thread; none without Django, or where it is not set up."""
    if "django.db" in sys.modules:
        from django.conf import settings  # type: ignore[import-untyped]
        from django.db import connections

        if not settings.configured:
            return
        for connection in connections.all(initialized_only=True):
            if connection.connection is not None:
                yield connection
