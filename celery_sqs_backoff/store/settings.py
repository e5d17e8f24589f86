"""Open the store and the records that ``app.conf.sqs_backoff`` describes, once per process.

=============  =================================================================================
``store``      a URL or an object; guards, steps, locks and workflows need it
``namespace``  text; default: the Celery app's name. It separates projects on one store
``secret``     text, or a list of texts of which the first signs; in Django the default is
               ``SECRET_KEY`` with ``SECRET_KEY_FALLBACKS``
``encrypt``    a ``Fernet`` or a similar object that encrypts records; default: not encrypted
=============  =================================================================================
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from botocore.exceptions import BotoCoreError
from celery.exceptions import ImproperlyConfigured

from .memory import MemoryStore
from .protocol import Store
from .records import Records

_lock = threading.Lock()
#: Open stores by process ID and URL, because clients and connections do not survive a fork.
_opened: dict[tuple[int, str], Store] = {}


def open_store(named: object) -> Store:
    """Return the store for a URL, or ``named`` itself if it is a store.

    The store connects at its first call.

    Raises:
        ImproperlyConfigured: the URL is invalid, or the library that it needs is not installed. The
            text does not show the URL, which may hold a password.
    """
    if isinstance(named, Store):
        return named
    if not isinstance(named, str) or (kind := named.partition(":")[0]) not in _KINDS:
        raise ImproperlyConfigured(f"store: unknown kind of store: expected {FORMS}")
    with _lock:
        at = (os.getpid(), named)
        if at not in _opened:
            _opened[at] = _open(kind, named)
        return _opened[at]


def _open(kind: str, url: str) -> Store:
    form, make = _KINDS[kind]
    try:
        if url != "django" and not url.startswith(f"{kind}://"):
            raise ValueError
        return make(url, urlsplit(url))
    except (ValueError, TypeError, LookupError):
        # Do not chain the error, because it may quote the URL.
        raise ImproperlyConfigured(f"store: invalid {kind} URL: expected {form}") from None
    except BotoCoreError as exc:  # such as a missing Region
        why = f"no client could be made ({type(exc).__name__})"
        raise ImproperlyConfigured(f"store: {why}: expected {form}") from exc
    except ImportError as exc:
        extra = "redis" if kind in ("rediss", "unix") else kind
        raise ImproperlyConfigured(
            f"store: {exc.name} is not installed: pip install 'celery-sqs-backoff[{extra}]'"
        ) from exc


# Each of the next functions raises ValueError or TypeError if its library would misread the URL.


def _redis(url: str, parts: SplitResult) -> Store:
    from .redis import RedisStore

    database = parts.path.strip("/")
    if not database if parts.scheme == "unix" else database and not database.isdigit():
        raise ValueError
    return RedisStore(url)


def _django(url: str, parts: SplitResult) -> Store:
    import django  # type: ignore[import-untyped]  # noqa: F401

    from .django import DjangoStore

    return DjangoStore(parts.netloc or "default")


def _dynamodb(url: str, parts: SplitResult) -> Store:
    from .dynamodb import DynamoDBStore

    return DynamoDBStore(parts.netloc, **dict(parse_qsl(parts.query)))


_REDIS = (
    "'redis://host:6379/0' (or 'rediss://'), with a number as port and as database, and special"
    " characters of a password percent-encoded, such as %2F for '/'"
)
_KINDS: dict[str, tuple[str, Callable[[str, SplitResult], Store]]] = {
    "redis": (_REDIS, _redis),
    "rediss": (_REDIS, _redis),
    "unix": ("'unix:///path/redis.sock', with the path of a socket", _redis),
    "django": ("'django' or 'django://alias'", _django),
    "dynamodb": (
        "'dynamodb://table?region=eu-central-1' (also '&endpoint_url=', '&clock_skew_seconds=')",
        _dynamodb,
    ),
    "memory": ("'memory://' (this process alone)", lambda url, parts: MemoryStore()),
}
FORMS = (
    "; ".join(dict.fromkeys(form for form, _ in _KINDS.values()))
    + "; or an object with the methods of Store"
)


def has_store(app: Any) -> bool:
    """Return whether the app names a store."""
    return _setting(app, "store") is not None


def require_store(app: Any) -> None:
    """Refuse an app that names no store.

    Raises:
        ImproperlyConfigured: the setting is missing.
    """
    if not has_store(app):
        raise ImproperlyConfigured(
            "Guards, steps, locks and workflows need a store: set"
            f" app.conf.sqs_backoff['store'] to {FORMS}"
        )


def require_signed(app: Any) -> None:
    """Refuse an app without a store, or with a shared store and unsigned records.

    Workflows need signed records, because a forged record could name any task as the undo of a
    step.

    Raises:
        ImproperlyConfigured: there is no store, or it is shared and its records are not signed.
    """
    require_store(app)
    if is_store_shared(app) and not is_signed(app):
        raise ImproperlyConfigured(
            "A workflow on a shared store needs signed records, because they say which task undoes"
            " a step: set sqs_backoff['secret'] to a long random text"
        )


def store_of(app: Any) -> Store:
    """Return the store that a Celery app names. For signed records call ``records_of``.

    Raises:
        ImproperlyConfigured: the setting is missing or invalid.
    """
    require_store(app)
    return open_store(_setting(app, "store"))


def is_store_shared(app: Any) -> bool:
    """Return whether other processes can use the app's store, as with any store but memory."""
    named = _setting(app, "store")
    if isinstance(named, str):
        return named.partition(":")[0] != "memory"
    return named is not None and not isinstance(named, MemoryStore)


def records_of(app: Any) -> Records:
    """Return the app's records, with namespace, secrets and cipher from its settings.

    Raises:
        ImproperlyConfigured: a setting is missing or invalid. The text names it and the remedy.
    """
    store, settings = store_of(app), app.conf.get("sqs_backoff")
    cached: tuple[object, object, Records] | None = vars(app).get("_sqs_backoff_records")
    if cached is not None and cached[0] is store and cached[1] is settings:
        return cached[2]
    records = Records(
        store, namespace=namespace_of(app), secrets=_secrets(app), cipher=_cipher(app)
    )
    app._sqs_backoff_records = (store, settings, records)
    return records


def namespace_of(app: Any) -> str:
    """Return the name that separates this project's records from others on the same store.

    Raises:
        ImproperlyConfigured: the store is shared, but ``namespace`` is missing and the app has no
            name.
    """
    namespace = _setting(app, "namespace")
    name = app.main if namespace is None else namespace
    has_name = isinstance(name, str) and name not in ("", "__main__", "default")
    if is_store_shared(app) and not has_name:
        raise ImproperlyConfigured(
            "sqs_backoff['namespace']: expected text, such as 'shop-staging': the Celery app has no"
            " name of its own, and two environments on one store would share guards and locks"
        )
    return str(name or "")


def is_signed(app: Any) -> bool:
    """Return whether the app's records are signed."""
    return bool(_secrets(app))


def _secrets(app: Any) -> Sequence[str | bytes]:
    secret = _setting(app, "secret")
    if secret is None:
        return _django_secrets()
    secrets = [secret] if isinstance(secret, str) else secret
    if not isinstance(secrets, list | tuple) or not secrets:
        secrets = [None]
    if not all(isinstance(each, str) and each for each in secrets):
        raise ImproperlyConfigured("sqs_backoff['secret']: expected text, or a list of texts")
    return secrets


def _django_secrets() -> Sequence[str | bytes]:
    if "django.conf" not in sys.modules:
        return ()
    from django.conf import settings  # type: ignore[import-untyped]
    from django.core import exceptions  # type: ignore[import-untyped]

    try:
        keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS] if settings.configured else []
    except exceptions.ImproperlyConfigured:  # Django raises on access if SECRET_KEY is empty
        return ()
    return [key for key in keys if key]  # an empty key would let anyone sign


def _cipher(app: Any) -> Any:
    cipher = _setting(app, "encrypt")
    methods = [getattr(cipher, name, None) for name in ("encrypt", "decrypt")]
    if cipher is not None and not all(map(callable, methods)):
        raise ImproperlyConfigured(
            "sqs_backoff['encrypt']: expected an object with encrypt(bytes) and decrypt(bytes),"
            " such as cryptography.fernet.Fernet(key)"
        )
    return cipher


def _setting(app: Any, name: str) -> Any:
    settings = app.conf.get("sqs_backoff") or {}
    return settings.get(name) if isinstance(settings, Mapping) else None
