"""Check at a worker's start whether its store can be used, and wait for one that is away."""

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

#: How long the check's record is there, should the process end before it has deleted it.
_CHECK_SECONDS = 60.0

#: Between two looks at a store that is away when a worker starts.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 5.0, 300.0


def check_offline(app: Any) -> None:
    """Refuse settings that cannot work, without asking the store.

    Raises:
        ImproperlyConfigured: names the setting and the remedy.
    """
    if has_store(app):
        if any(getattr(task, "has_workflows", False) for task in app.tasks.values()):
            require_signed(app)
        records_of(app)
        if isinstance(store := store_of(app), DjangoStore):
            store.check_settings()


def check_by_asking(app: Any) -> None:
    """Refuse a store that lacks a table or a right, or has a broken cipher.

    Raises:
        ImproperlyConfigured: names the store's kind and the remedy, never its URL.
        StoreUnavailable: the store does not answer, or takes no changes now.
    """
    check_offline(app)
    if not has_store(app):
        return
    records = records_of(app)
    try:  # Each of the four may need a right of its own.
        new = records.add("check", uuid4().hex, {"state": "new"}, _CHECK_SECONDS)
        old = records.replace(new, {"state": "old"}, None) or new
        records.reread(old)
        records.delete(old)
    except StoreRefused as exc:
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: it refuses what runs ask of it ({exc}): correct its address, or"
            " the rights of its user"
        ) from exc
    except (RecordRejected, ValueError, TypeError, AttributeError) as exc:
        # Steps would run and never be recorded.
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: its records cannot be written and read"
            f" ({error_site(exc.__cause__ or exc)}): correct the options of its address, or"
            " sqs_backoff['encrypt'], whose decrypt(encrypt(data)) must be data"
        ) from None


def forgery_of(app: Any) -> str | None:
    """Return why others can make records up, or ``None`` if they cannot."""
    if not is_store_shared(app) or is_signed(app):
        return None
    return (
        "sqs_backoff['secret'] is missing: whoever can write to the store can make a step or a"
        " guard's result up"
    )


def eviction_of(app: Any) -> str | None:
    """Return why the store may drop records before their end.

    ``None`` = it does not, as far as is known.

    If the record of a guard, a lock or a step is dropped, a second run does the work again.

    Raises:
        ImproperlyConfigured: the app's store is invalid.
    """
    store = store_of(app) if has_store(app) else None
    return store.evicts() if isinstance(store, RedisStore) else None


#: Kept, because Python would end an unreferenced pool, and wait for its threads.
_FORGOTTEN: list[Any] = []


class WrongStore(ImproperlyConfigured, click.ClickException):  # type: ignore[misc]
    """Ends a worker at its start. The command line shows it as one line."""


class StoreStep(bootsteps.Step):  # type: ignore[misc]  # Celery is not typed
    """Checks the store when a worker starts. Runs in the main process.

    A wrong store ends the worker. A store that is away does not: a thread waits for it.
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
    """Log that the store is away, with growing pauses, until it answers."""
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
            "sqs_backoff.store_evicts: %s: work may be done twice. Set it to noeviction", why
        )


def _forget_pools() -> None:
    """Forget the parent's database pools (``OPTIONS["pool"]``) in a process that has been forked.

    Those of the main process may be open then. Their threads have stayed there, and so have their
    connections, which two processes must not share. It comes first in that process, because Celery
    closes pools next (celery/fixups/django.py), which would end the main process's connections.
    """
    backend = sys.modules.get("django.db.backends.postgresql.base")
    pools = getattr(getattr(backend, "DatabaseWrapper", None), "_connection_pools", None)
    if pools:
        _FORGOTTEN.extend(pools.values())
        pools.clear()
