"""Which store a project uses: the one place that reads ``sqs_backoff["store"]``."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery.exceptions import ImproperlyConfigured

from ..store import Store

__all__ = ["check_store", "check_store_of", "has_store", "open_store", "store_of"]

_FORMS = (
    "'redis://host:6379/0' (or 'rediss://', 'unix://'), 'django' or 'django://alias',"
    " 'dynamodb://table' (with '?region=', '?endpoint_url=', '?clock_skew_seconds='),"
    " 'memory://' (this process alone), or an object with the methods of Store"
)

_NO_STORE = (
    "Guards, steps, locks and renewed keys need a store: set"
    f" app.conf.sqs_backoff['store'] to {_FORMS}"
)

_KINDS = ("redis", "rediss", "unix", "django", "dynamodb", "memory")

_lock = threading.Lock()
#: By process too: clients and their connections do not survive a fork.
_opened: dict[tuple[int, str], Store] = {}


def has_store(app: Any) -> bool:
    """Whether the app names a store."""
    return _named(app) is not None


def store_of(app: Any) -> Store:
    """Return the store that a Celery app names.

    Raises:
        ImproperlyConfigured: it names none, or one that is not known.
    """
    named = _named(app)
    if named is None:
        raise ImproperlyConfigured(_NO_STORE)
    return open_store(named)


def check_store_of(app: Any, *, is_needed: bool) -> None:
    """Refuse a store that is none, and, if one is needed, an app without.

    Raises:
        ImproperlyConfigured: of that kind.
    """
    if (named := _named(app)) is not None:
        check_store(named)
    elif is_needed:
        raise ImproperlyConfigured(_NO_STORE)


def check_store(named: object) -> None:
    """Refuse what :func:`open_store` would, as far as that can be told without opening it.

    Raises:
        ImproperlyConfigured: it is neither a URL of a known kind nor a store.
    """
    if isinstance(named, Store):
        return
    if not isinstance(named, str):
        raise ImproperlyConfigured(
            f"store: a {type(named).__name__} is not legal: it must be {_FORMS}"
        )
    kind = named.partition(":")[0]
    if kind not in _KINDS:
        # Not the URL itself, which may hold a password.
        raise ImproperlyConfigured(f"store: {kind!r} is not known; known are {_FORMS}")


def open_store(named: object) -> Store:
    """Return the store of a URL: the same one for the same URL, once per process. It connects late.

    Raises:
        ImproperlyConfigured: the URL is none of those known, or its library is not installed.
    """
    check_store(named)
    if isinstance(named, Store):
        return named
    assert isinstance(named, str)
    with _lock:
        at = (os.getpid(), named)
        if at not in _opened:
            _opened[at] = _open(named)
        return _opened[at]


def _open(url: str) -> Store:
    parts = urlsplit(url)
    scheme = parts.scheme or url
    try:
        if scheme in ("redis", "rediss", "unix"):
            from .redis import RedisStore

            return RedisStore(url)
        if scheme == "django":
            import django  # type: ignore[import-untyped]  # noqa: F401

            from .django import DjangoStore

            return DjangoStore(parts.netloc or "default")
        if scheme == "dynamodb" and parts.netloc:
            from .dynamodb import DynamoDBStore

            return DynamoDBStore(parts.netloc, **_dynamodb_options(parts.query))
        if scheme == "memory":
            from .memory import MemoryStore

            return MemoryStore()
    except ImportError as exc:
        extra = "redis" if scheme in ("rediss", "unix") else scheme
        raise ImproperlyConfigured(
            f"store: {exc.name} is not installed: pip install 'celery-sqs-backoff[{extra}]'"
        ) from exc
    raise ImproperlyConfigured("store: 'dynamodb://' names no table: 'dynamodb://table'")


def _dynamodb_options(query: str) -> dict[str, Any]:
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    options: dict[str, Any] = {
        name: given.pop(name) for name in ("region", "endpoint_url") if name in given
    }
    try:
        if "clock_skew_seconds" in given:
            options["clock_skew_seconds"] = float(given.pop("clock_skew_seconds"))
    except ValueError as exc:
        raise ImproperlyConfigured("store: clock_skew_seconds must be a number") from exc
    if given:
        raise ImproperlyConfigured(f"store: unknown options {', '.join(sorted(given))}")
    return options


def _named(app: Any) -> object:
    settings = app.conf.get("sqs_backoff") or {}
    return settings.get("store") if isinstance(settings, Mapping) else None
