"""Find and close Django's database connections of a thread, and refuse open transactions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from .errors import StoreInTransaction

T = TypeVar("T")


def refuse_open_transaction(what: str, *, why: str) -> None:
    """Refuse to go on in an open transaction. A rollback would undo either the work or its record.

    Arguments:
        what: start of the error's text, such as ``"No lock is taken"``.
        why: end of the error's text, with the reason and the remedy.

    Raises:
        StoreInTransaction: a Django transaction is open in this thread.
    """
    for connection in open_connections():
        if is_in_transaction(connection):
            there = f"inside a transaction of the database alias {connection.alias!r}"
            if not connection.in_atomic_block:
                there = f"while autocommit is off for the database alias {connection.alias!r}"
            raise StoreInTransaction(f"{what} {there}: {why}")


def is_in_transaction(connection: Any) -> bool:
    """Return whether a statement on the connection may still be rolled back.

    The transaction that Django's ``TestCase`` wraps around each test does not count.
    """
    if blocks := connection.atomic_blocks:
        return any(not getattr(block, "_from_testcase", False) for block in blocks)
    return not connection.get_autocommit()


def close(connection: Any) -> None:
    """Close a connection and its pool (``OPTIONS["pool"]``), if it has one."""
    connection.close()
    if hasattr(connection, "close_pool"):
        with suppress(KeyError):  # another thread has closed the pool of this process
            connection.close_pool()


def ask_and_close(ask: Callable[[], T]) -> T:
    """Return the result of ``ask``, and close the Django connections that ``ask`` opened.

    A process that is forked later would share the connections, and could read answers that the
    database sends to another process. Celery drops connections after a fork only if
    ``DJANGO_SETTINGS_MODULE`` was set when the app was made.
    """
    before = list(open_connections())
    try:
        return ask()
    finally:
        for connection in open_connections():
            if connection not in before:
                connection.close()


def open_connections() -> Iterator[Any]:
    """Yield the open connections of Django in this thread, if Django is set up."""
    if "django.db" in sys.modules:
        from django.conf import settings  # type: ignore[import-untyped]
        from django.db import connections  # type: ignore[import-untyped]

        if not settings.configured:
            return
        for connection in connections.all(initialized_only=True):
            if connection.connection is not None:
                yield connection
