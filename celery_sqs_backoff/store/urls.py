"""The stores that a URL can name, each opened once per process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from celery.exceptions import ImproperlyConfigured

from .memory import MemoryStore
from .protocol import Store

FORMS = (
    "'redis://host:6379/0' (or 'rediss://', 'unix://'), 'django' or 'django://alias',"
    " 'dynamodb://table' (with '?region=', '?endpoint_url=', '?clock_skew_seconds='),"
    " 'memory://' (this process alone), or an object with the methods of Store"
)

_lock = threading.Lock()
#: By process too: clients and their connections do not survive a fork.
_opened: dict[tuple[int, str], Store] = {}


def is_shared(named: object) -> bool:
    """Return whether other processes may use the store: all but those in memory."""
    if isinstance(named, str):
        return named.partition(":")[0] != "memory"
    return named is not None and not isinstance(named, MemoryStore)


def open_store(named: object) -> Store:
    """Return the store of a URL, or the store that is given. It connects when it is asked.

    Raises:
        ImproperlyConfigured: the URL is none of those known, or its library is not installed.
    """
    if isinstance(named, Store):
        return named
    if not isinstance(named, str):
        raise ImproperlyConfigured(f"store: invalid {type(named).__name__}: expected {FORMS}")
    with _lock:
        at = (os.getpid(), named)
        if at not in _opened:
            _opened[at] = _open(named)
        return _opened[at]


def _open(url: str) -> Store:
    # No error shows any of the URL, which may hold a password, first of all if its kind is missing.
    kind = url.partition(":")[0]
    if kind not in _MAKERS:
        raise ImproperlyConfigured(f"store: unknown kind of URL: expected {FORMS}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ImproperlyConfigured(
            "store: invalid host or port in the URL: expected a number as the port, and special"
            " characters of a password percent-encoded, such as %2F for '/'"
        ) from None
    try:
        if url != "django" and not url.startswith(f"{kind}://"):
            raise ValueError("no host")
        return _MAKERS[kind](url, parts)
    except (ValueError, TypeError, LookupError):  # A library's error may quote the URL.
        raise ImproperlyConfigured(f"store: invalid {kind} URL: expected {FORMS}") from None
    except ImportError as exc:
        extra = "redis" if kind in ("rediss", "unix") else kind
        raise ImproperlyConfigured(
            f"store: {exc.name} is not installed: pip install 'celery-sqs-backoff[{extra}]'"
        ) from exc


def _redis(url: str, parts: SplitResult) -> Store:
    from .redis import RedisStore

    if parts.scheme == "unix":
        if not parts.path:
            raise ImproperlyConfigured(
                "store: 'unix://' names no socket: 'unix:///path/redis.sock'"
            )
    elif not parts.path.lstrip("/").isdigit() and parts.path > "/":
        raise ImproperlyConfigured(
            "store: invalid database in the Redis URL: expected a number after the host, as in"
            " 'redis://host:6379/0', and special characters of a password percent-encoded"
        )
    return RedisStore(url)


def _django(url: str, parts: SplitResult) -> Store:
    import django  # type: ignore[import-untyped]  # noqa: F401

    from .django import DjangoStore

    return DjangoStore(parts.netloc or "default")


def _dynamodb(url: str, parts: SplitResult) -> Store:
    from botocore.exceptions import BotoCoreError

    from .dynamodb import DynamoDBStore

    options: dict[str, Any] = dict(parse_qsl(parts.query))
    if not parts.netloc or options.keys() - {"region", "endpoint_url", "clock_skew_seconds"}:
        raise ValueError("no table, or an unknown option")
    if "clock_skew_seconds" in options:
        options["clock_skew_seconds"] = float(options["clock_skew_seconds"])
    try:
        return DynamoDBStore(parts.netloc, **options)
    except BotoCoreError as exc:
        raise ImproperlyConfigured(
            f"store: no DynamoDB client could be made ({type(exc).__name__}): give the region, as"
            " in 'dynamodb://table?region=eu-central-1'"
        ) from exc


_MAKERS: dict[str, Callable[[str, SplitResult], Store]] = {
    "redis": _redis,
    "rediss": _redis,
    "unix": _redis,
    "django": _django,
    "dynamodb": _dynamodb,
    "memory": lambda url, parts: MemoryStore(),
}
