"""Which store a project uses: the one place that reads ``sqs_backoff["store"]``."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery.exceptions import ImproperlyConfigured

from .protocol import Store

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


def is_shared(named: object) -> bool:
    """Whether other processes may read and write the store: all but those in memory."""
    from .memory import MemoryStore

    if isinstance(named, str):
        return named.partition(":")[0] != "memory"
    return named is not None and not isinstance(named, MemoryStore)


def store_of(app: Any) -> Store:
    """Return the store that a Celery app names, as it is: ``settings.vault_of`` is what to use.

    Raises:
        ImproperlyConfigured: it names none, or one that is not known.
    """
    named = _named(app)
    if named is None:
        raise ImproperlyConfigured(_NO_STORE)
    return open_store(named)


def require_store(app: Any) -> None:
    """Refuse an app that names no store.

    Raises:
        ImproperlyConfigured: it names none.
    """
    if not has_store(app):
        raise ImproperlyConfigured(_NO_STORE)


def check_store(named: object) -> None:
    """Refuse what :func:`open_store` would, as far as that can be told without opening it.

    Raises:
        ImproperlyConfigured: it is neither a URL of a known kind nor a store.
    """
    if isinstance(named, Store):
        return
    if not isinstance(named, str):
        raise ImproperlyConfigured(f"store: invalid {type(named).__name__}: expected {_FORMS}")
    # No error shows any of the URL, which may hold a password, first of all if its kind is missing.
    kind = named.partition(":")[0]
    if kind not in _KINDS:
        raise ImproperlyConfigured(f"store: unknown kind of URL: expected {_FORMS}")
    try:
        parts = urlsplit(named)
        _ = parts.port
    except ValueError:
        raise ImproperlyConfigured(
            "store: invalid host or port in the URL: expected a number as the port, and special"
            " characters of a password percent-encoded, such as %2F for '/'"
        ) from None
    if kind == "dynamodb":
        if not parts.netloc:
            raise ImproperlyConfigured("store: 'dynamodb://' names no table: 'dynamodb://table'")
        _dynamodb_options(parts.query)
    elif named != "django" and not named.startswith(f"{kind}://"):
        raise ImproperlyConfigured(f"store: invalid {kind} URL: expected {_FORMS}")
    elif kind in ("redis", "rediss") and not parts.path.lstrip("/").isdigit() and parts.path > "/":
        raise ImproperlyConfigured(
            "store: invalid database in the Redis URL: expected a number after the host, as in"
            " 'redis://host:6379/0', and special characters of a password percent-encoded"
        )
    elif kind == "unix" and not parts.path:
        raise ImproperlyConfigured("store: 'unix://' names no socket: 'unix:///path/redis.sock'")


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
        if scheme == "dynamodb":
            return _dynamodb(parts.netloc, _dynamodb_options(parts.query))
        from .memory import MemoryStore

        return MemoryStore()
    # A URL that only the library can tell is wrong; it may quote it.
    except (ValueError, TypeError, LookupError):
        raise ImproperlyConfigured(f"store: invalid {scheme} URL: expected {_FORMS}") from None
    except ImportError as exc:
        extra = "redis" if scheme in ("rediss", "unix") else scheme
        raise ImproperlyConfigured(
            f"store: {exc.name} is not installed: pip install 'celery-sqs-backoff[{extra}]'"
        ) from exc


def _dynamodb(table: str, options: dict[str, Any]) -> Store:
    from botocore.exceptions import BotoCoreError

    from .dynamodb import DynamoDBStore

    try:
        return DynamoDBStore(table, **options)
    except BotoCoreError as exc:
        raise ImproperlyConfigured(
            f"store: no DynamoDB client could be made ({type(exc).__name__}): give the region, as"
            " in 'dynamodb://table?region=eu-central-1'"
        ) from exc


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
