"""Nothing is sent before the data that it is about is committed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..store.connections import is_in_transaction, open_connections


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
