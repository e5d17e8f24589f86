"""Nothing is sent before the data that it is about is committed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .errors import StoreInTransaction

__all__ = [
    "after_commit",
    "in_test_case",
    "in_transaction",
    "open_connections",
    "open_transactions",
    "refuse_manual_transaction",
    "refuse_open_transaction",
]


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
        if alias in committed or not _is_in_transaction(connection):
            continue
        if committed and in_test_case(connection):
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
    return [c.alias for c in open_connections() if in_transaction(c)]


def in_test_case(connection: Any) -> bool:
    """Whether the only transaction that is open is the one around a test of Django's ``TestCase``.

    It never ends, and a rollback takes all back together: it counts as none.
    """
    blocks = connection.atomic_blocks
    return bool(blocks) and all(getattr(block, "_from_testcase", False) for block in blocks)


def in_transaction(connection: Any) -> bool:
    """Whether a rollback could part a record from what it records."""
    return _is_in_transaction(connection) and not in_test_case(connection)


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


def refuse_open_transaction(what: str) -> None:
    """Refuse to record what a rollback would take back.

    The transaction that Django's ``TestCase`` wraps around each test does not count.

    Raises:
        StoreInTransaction: a Django transaction is open in this thread.
    """
    for connection in open_connections():
        if in_transaction(connection):
            raise StoreInTransaction(
                f"{what} inside a transaction of the database alias {connection.alias!r}: a"
                " rollback would undo the work, but not its record. Leave the atomic block first,"
                " or open it inside the step's function"
            )


def _is_in_transaction(connection: Any) -> bool:
    return connection.in_atomic_block or not connection.get_autocommit()


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
