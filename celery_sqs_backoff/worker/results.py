"""The result backend, asked by us in Celery's event loop: it may hang, and the loop must not.

What Celery itself stores there (a failure of a lost process, a revoked task) waits as in Celery.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from ..store.connections import ask_and_close
from ..threads import call_in_time

T = TypeVar("T")

_LONGEST_WAIT_SECONDS: Final = 1.0


class BackendHangs(Exception):
    """The result backend has not answered in time; or the machine has no thread left to ask in."""


def in_time(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns. It is called in another thread, which has its own backend.

    Celery's Redis backend waits two minutes for a response, and tries again; its database backend
    waits for as long as the database is silent.

    Raises:
        BackendHangs: it takes longer than a second, and goes on. Else what ``ask`` raises.
    """
    asked = call_in_time(partial(ask_and_close, ask), seconds=_LONGEST_WAIT_SECONDS)
    if asked is None or not asked.done():
        raise BackendHangs
    return asked.result()
