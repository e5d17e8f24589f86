"""Read the store, and how its records are signed, from ``app.conf.sqs_backoff``.

=============  =================================================================================
``store``      a URL or an object; without it there are no guards, steps, locks and workflows
``namespace``  text; default: the Celery app's name. It keeps projects apart on one store
``secret``     text, or a list of texts of which the first signs; in Django the default is
               ``SECRET_KEY`` with ``SECRET_KEY_FALLBACKS``
``encrypt``    a ``Fernet`` or the like, for records; default: none
=============  =================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from celery.exceptions import ImproperlyConfigured

from .protocol import Store
from .records import Records
from .urls import FORMS, is_shared, open_store
from .vault import Vault

Secrets = Sequence[str | bytes]


def has_store(app: Any) -> bool:
    """Return whether the app names a store."""
    return _setting(app, "store") is not None


def require_store(app: Any) -> None:
    """Refuse an app that names no store.

    Raises:
        ImproperlyConfigured: it names none.
    """
    if not has_store(app):
        raise ImproperlyConfigured(
            "Guards, steps, locks and renewed keys need a store: set"
            f" app.conf.sqs_backoff['store'] to {FORMS}"
        )


def require_signed(app: Any) -> None:
    """Refuse an app on whose store others could write which task undoes a step.

    Raises:
        ImproperlyConfigured: the store is shared, and its records are not signed.
    """
    if is_store_shared(app) and not is_signed(app):
        raise ImproperlyConfigured(
            "A workflow on a shared store needs signed records, because they say which task takes a"
            " step back: set sqs_backoff['secret'] to a long random text"
        )


def store_of(app: Any) -> Store:
    """Return the store that a Celery app names, whose records are not signed.

    Raises:
        ImproperlyConfigured: it names none, or one that is not known.
    """
    require_store(app)
    return open_store(_setting(app, "store"))


def is_store_shared(app: Any) -> bool:
    """Return whether the app names a store that other processes can use."""
    return is_shared(_setting(app, "store"))


def vault_of(app: Any) -> Vault:
    """Return the app's signed store.

    Raises:
        ImproperlyConfigured: a setting is missing or invalid.
    """
    return records_of(app).vault


def records_of(app: Any) -> Records:
    """Return the app's records.

    Raises:
        ImproperlyConfigured: a setting is missing or invalid.
    """
    store, settings = store_of(app), app.conf.get("sqs_backoff")
    cached: tuple[object, object, Records] | None = vars(app).get("_sqs_backoff_records")
    if cached is not None and cached[0] is store and cached[1] is settings:
        return cached[2]
    vault = Vault(store, namespace=namespace_of(app), secrets=_secrets(app))
    records = Records(vault, cipher=_cipher(app))
    app._sqs_backoff_records = (store, settings, records)
    return records


def check_settings(app: Any) -> None:
    """Refuse settings that could not work, as far as can be told without opening the store.

    Raises:
        ImproperlyConfigured: names the setting and what to do.
    """
    _secrets(app)
    _cipher(app)
    if is_store_shared(app):
        namespace_of(app)


def namespace_of(app: Any) -> str:
    """Return what keeps this project's records apart from others on the same store.

    Raises:
        ImproperlyConfigured: the store is shared and neither the setting nor the app has a name.
    """
    namespace = _setting(app, "namespace")
    if namespace is not None and (not isinstance(namespace, str) or not namespace):
        raise ImproperlyConfigured(
            f"sqs_backoff['namespace']: invalid {namespace!r}: expected text, such as"
            " 'shop-staging'"
        )
    name = namespace or app.main
    if name in (None, "__main__", "default") and is_store_shared(app):
        raise ImproperlyConfigured(
            "sqs_backoff['namespace'] is missing, and the Celery app has no name of its own: two"
            " environments on one store would share guards, steps and locks. Set it, for example"
            " to 'shop-staging'"
        )
    return str(name or "")


def is_signed(app: Any) -> bool:
    """Return whether the app's records are signed."""
    return bool(_secrets(app))


def _secrets(app: Any) -> Secrets:
    secret = _setting(app, "secret")
    if secret is None:
        return _django_secrets()
    secrets = [secret] if isinstance(secret, str) else secret
    if (
        not isinstance(secrets, Sequence)
        or not secrets
        or not all(isinstance(s, str) and s for s in secrets)
    ):
        raise ImproperlyConfigured("sqs_backoff['secret']: expected text, or a list of texts")
    return list(secrets)


def _django_secrets() -> Secrets:
    if "django.conf" not in sys.modules:
        return ()
    from django.conf import settings  # type: ignore[import-untyped]
    from django.core.exceptions import (  # type: ignore[import-untyped]
        ImproperlyConfigured as InvalidSettings,
    )

    if not settings.configured:
        return ()
    try:
        keys = [settings.SECRET_KEY, *getattr(settings, "SECRET_KEY_FALLBACKS", ())]
    except InvalidSettings:  # it is lazy, and raises when it is empty
        return ()
    return [key for key in keys if key]  # anybody can sign with an empty one


def _cipher(app: Any) -> Any:
    cipher = _setting(app, "encrypt")
    if cipher is not None and not (
        callable(getattr(cipher, "encrypt", None)) and callable(getattr(cipher, "decrypt", None))
    ):
        raise ImproperlyConfigured(
            "sqs_backoff['encrypt']: expected an object with encrypt(bytes) and decrypt(bytes),"
            " such as cryptography.fernet.Fernet(key)"
        )
    return cipher


def _setting(app: Any, name: str) -> Any:
    settings = app.conf.get("sqs_backoff") or {}
    return settings.get(name) if isinstance(settings, Mapping) else None
