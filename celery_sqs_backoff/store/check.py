"""Check at a worker's start whether its store can be used, and wait for one that is away."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import click
from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..text import error_site, type_name
from ..threads import start_daemon
from .connections import ask_and_close, close, open_connections
from .django import DjangoStore
from .errors import RecordRejected, StoreRefused, StoreUnavailable
from .protocol import key_of
from .records import Records
from .redis import RedisStore
from .settings import (
    check_settings,
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
        ImproperlyConfigured: names the setting and what to do.
    """
    check_settings(app)
    if any(getattr(task, "has_workflows", False) for task in app.tasks.values()):
        require_signed(app)
    if has_store(app) and isinstance(store := store_of(app), DjangoStore):
        store.check_settings()


def check_by_asking(app: Any) -> None:
    """Refuse a store that lacks a table or a right, or has a broken cipher.

    Raises:
        ImproperlyConfigured: names the store's kind and what to do; never its URL.
        StoreUnavailable: the store does not answer, or takes no changes now.
    """
    check_offline(app)
    if not has_store(app):
        return
    store = store_of(app)
    try:
        if isinstance(store, DjangoStore):
            store.check_table()
        key = key_of("check", uuid4().hex)
        store.add(key, "new", _CHECK_SECONDS)  # Each of the four may need a right of its own.
        store.get(key)
        store.replace(key, "new", "old", None)
        store.delete(key, "old")
    except (StoreRefused, RecordRejected) as exc:
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: it refuses what runs ask of it ({exc}): correct its address, or"
            " the credentials and rights of its user"
        ) from exc
    except (ValueError, TypeError, AttributeError) as exc:  # the library's, of an option
        raise ImproperlyConfigured(
            f"sqs_backoff['store']: it cannot be used ({type_name(exc)}): correct the options of"
            " its address"
        ) from None
    _try_cipher(records_of(app))


def _try_cipher(records: Records) -> None:
    """Check that the cipher can decrypt what it encrypts. Else steps run and are never recorded.

    Raises:
        ImproperlyConfigured: what was encrypted cannot be decrypted.
    """
    why = "it does not return what was encrypted"
    try:
        text = records._open(records._seal({"text": "text"}))
        if text == {"text": "text"}:
            return
    except Exception as exc:  # noqa: BLE001  # whatever the cipher's library raises
        why = error_site(exc.__cause__ or exc)
    raise ImproperlyConfigured(
        f"sqs_backoff['encrypt']: it does not work ({why}): expected an object whose"
        " decrypt(encrypt(data)) is data, such as cryptography.fernet.Fernet(key)"
    )


def warnings_of(app: Any) -> Iterator[str]:
    """Yield warnings of settings that work and are not safe in production."""
    if is_store_shared(app) and not is_signed(app):
        yield (
            "sqs_backoff['secret'] is missing: whoever can write to the store can make a step or"
            " a guard's result up"
        )


def eviction_of(app: Any) -> str | None:
    """Return why the store may drop records before their end, or ``None`` if nothing says so.

    A guard, a lock or a step whose record is dropped lets a second run do the work again.

    Raises:
        ImproperlyConfigured: the app's store is invalid.
    """
    store = store_of(app) if has_store(app) else None
    return store.evicts() if isinstance(store, RedisStore) else None


#: Kept: to end a pool, as Python does with one that nobody has, would wait for its threads.
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
            _check_and_close(app)
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
            "sqs_backoff['store'] is in memory: the processes of a prefork worker do not share it,"
            " so guards and locks would let all of them through. Use redis://, django or"
            " dynamodb://, or a pool in one process (--pool solo or threads)"
        )


def _warn(app: Any) -> None:
    for warning in warnings_of(app):
        logger.warning("sqs_backoff.not_signed: %s", warning)
    if (why := eviction_of(app)) is not None:
        logger.warning(
            "sqs_backoff.store_evicts: %s: guards, locks and steps whose records it drops let"
            " work be done twice. Use a server with maxmemory-policy noeviction",
            why,
        )


def _check_and_close(app: Any) -> None:
    """Check the store, and leave none of Django's connections open that was not before.

    The processes of a pool would share it, and read each other's answers. After a fork Celery
    drops it, but only if ``DJANGO_SETTINGS_MODULE`` was set when the app was made.
    """
    before = list(open_connections())
    try:
        check_by_asking(app)
    finally:
        for connection in open_connections():
            if connection not in before:
                close(connection)


def _forget_pools() -> None:
    """Forget the parent's database pools (``OPTIONS["pool"]``) in a process that has been forked.

    Those of the main process may be open then. Their threads have stayed there, and so have their
    connections, which two processes must not share. First of all in that process: to close such a
    pool, as Celery does next (celery/fixups/django.py), would end the main process's connections.
    """
    backend = sys.modules.get("django.db.backends.postgresql.base")
    pools = getattr(getattr(backend, "DatabaseWrapper", None), "_connection_pools", None)
    if pools:
        _FORGOTTEN.extend(pools.values())
        pools.clear()
