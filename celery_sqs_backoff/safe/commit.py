"""Nothing is sent before the data that it is about is committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

__all__ = ["after_commit"]


def after_commit(send: Callable[[], object]) -> None:
    """Call ``send`` once no Django transaction is open on any of this thread's connections.

    At once, where there is none, or no Django. After a rollback never.
    """
    if "django.db" in sys.modules:
        from django.db import connections, transaction  # type: ignore[import-untyped]

        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                again = partial(after_commit, send)  # another connection may be in one too
                transaction.on_commit(again, using=connection.alias)
                return
    send()
