"""Check at a worker's start whether its store can be used, and wait for a store that is down."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any
from uuid import uuid4

import click
from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..text import error_site
from ..threads import start_daemon
from .connections import ask_and_close
from .django import DjangoStore
from .errors import RecordRejected, StoreRefused, StoreUnavailable
from .redis import RedisStore
from .settings import (
    has_store,
    is_signed,
    is_store_shared,
    records_of,
    require_signed,
    store_of,
)

logger = get_logger(__name__)

#: The check writes a record, which expires after this time if the process cannot delete it.
_CHECK_SECONDS = 60.0

#: Pauses between two checks of a store that is down when a worker starts. The first pause has the
#: first value. Later pauses grow up to the second value.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 5.0, 300.0


def check_offline(app: Any) -> None:
    """Refuse settings that cannot work. Send no request to the store.

    Raises:
        ImproperlyConfigured: a setting is wrong. The text names the setting and the remedy.
    """
    if has_store(app):
        if any(getattr(task, "has_workflows", False) for task in app.tasks.values()):
            require_signed(app)
        records_of(app)
        if isinstance(store := store_of(app), DjangoStore):
            store.check_settings()


def check_by_asking(app: Any) -> None:
    """Refuse a store in which a record cannot be written, read and deleted.

    Raises:
        ImproperlyConfigured: a table or permission is missing, or the cipher is broken. The text
            names the remedy, but not the URL, which may hold a password.
        StoreUnavailable: the store does not answer, or accepts no writes now.
    """
    check_offline(app)
    if not has_store(app):
        return
    records = records_of(app)
    try:  # Call all four methods, because each may need a permission of its own.
        new = records.add("check", uuid4().hex, {"state": "new"}, _CHECK_SECONDS)
        old = records.replace(new, {"state": "old"}, None) or new
        records.reread(old)
        records.delete(old)
    except StoreRefused as exc:
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: the store refuses a call ({exc}): correct its address, or the"
            " rights of its user"
        ) from exc
    except (RecordRejected, ValueError, TypeError, AttributeError) as exc:
        # Report this at the worker's start. Otherwise steps would run and never be recorded.
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: its records cannot be written and read"
            f" ({error_site(exc.__cause__ or exc)}): correct the options of its address, or"
            " sqs_backoff['encrypt'], whose decrypt(encrypt(data)) must be data"
        ) from None


def forgery_of(app: Any) -> str | None:
    """Return why other users of the store can forge records, or ``None`` if they cannot."""
    if not is_store_shared(app) or is_signed(app):
        return None
    return (
        "sqs_backoff['secret'] is missing: any user who can write to the store can forge a step or"
        " a guard's result"
    )


def eviction_of(app: Any) -> str | None:
    """Return why the store may drop records before they expire, or ``None`` if no reason is known.

    If the record of a guard, a lock or a step is dropped, a second run does the work again.

    Raises:
        ImproperlyConfigured: the app's store is invalid.
    """
    store = store_of(app) if has_store(app) else None
    return store.evicts() if isinstance(store, RedisStore) else None


#: In a forked process, the database connection pools of its parent. Without a reference, Python
#: would close the pools and wait for their threads, which do not exist in the forked process.
_FORGOTTEN: list[Any] = []


class WrongStore(ImproperlyConfigured, click.ClickException):  # type: ignore[misc]
    """Ends a worker at its start. The command line shows it as one line."""


class StoreStep(bootsteps.Step):  # type: ignore[misc]  # Celery is not typed
    """Checks the store when a worker starts. Runs in the main process.

    Wrong settings end the worker. If the store is down, the worker starts without it, and a thread
    waits for the store.
    """

    def create(self, worker: Any) -> None:
        app = worker.app
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=_forget_pools)
        try:
            _refuse_memory(app, worker.pool_cls)
            ask_and_close(partial(check_by_asking, app))
        except ImproperlyConfigured as exc:
            raise WrongStore(str(exc)) from exc.__cause__
        except StoreUnavailable as exc:
            start_daemon("sqs-store", partial(_wait_for_store, app, exc))
        else:
            _warn(app)


def _wait_for_store(app: Any, why: Exception) -> None:
    """Check the store, with growing pauses, until it works. Log each failure and the recovery."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        logger.error("sqs_backoff.store_away: %s. Tasks that need the store are retried", why)
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        try:
            ask_and_close(partial(check_by_asking, app))
        except (StoreUnavailable, ImproperlyConfigured) as exc:
            why = exc
        else:
            logger.warning("sqs_backoff.store_answers: the store answers again")
            return _warn(app)


def _refuse_memory(app: Any, pool: Any) -> None:
    is_prefork = "prefork" in getattr(pool, "__module__", str(pool))
    if has_store(app) and not is_store_shared(app) and is_prefork:
        raise ImproperlyConfigured(
            "sqs_backoff['store'] is in memory, which the processes of a prefork worker do not"
            " share: use another store, or a pool in one process (--pool solo or threads)"
        )


def _warn(app: Any) -> None:
    if (why := forgery_of(app)) is not None:
        logger.warning("sqs_backoff.not_signed: %s", why)
    if (why := eviction_of(app)) is not None:
        logger.warning(
            "sqs_backoff.store_evicts: %s, so records may be dropped early and work done twice."
            " Set maxmemory-policy to noeviction",
            why,
        )


def _forget_pools() -> None:
    """Forget the parent's database pools (``OPTIONS["pool"]``) in a process that has been forked.

    The main process may have pools open when it forks. The new process has no threads of the
    pools, and must not share their connections. Call this first in the new process: Celery closes
    the pools next (celery/fixups/django.py), which would end the connections of the main process.
    """
    backend = sys.modules.get("django.db.backends.postgresql.base")
    pools = getattr(getattr(backend, "DatabaseWrapper", None), "_connection_pools", None)
    if pools:
        _FORGOTTEN.extend(pools.values())
        pools.clear()
