"""The id under which a provider is asked to do something once, on every attempt the same."""

from __future__ import annotations

import json
from uuid import NAMESPACE_URL, uuid5

from ..store.protocol import Store, key_of
from .names import text_of
from .writes import increment, number

__all__ = ["idempotency_key", "renew", "version"]

_NAMESPACE = uuid5(NAMESPACE_URL, "https://pypi.org/project/celery-sqs-backoff/")


def idempotency_key(namespace: str, scope: str, name: object, version: int) -> str:
    """Derive the key: a UUID, the same for the same four on every machine.

    Raises:
        TypeError, ValueError: ``name`` is not text, an int or a UUID, or is empty.
    """
    parts = [namespace, scope, text_of("name", name), version]
    return str(uuid5(_NAMESPACE, json.dumps(parts)))


def version(store: Store, scope: str, name: object) -> int:
    """Return the key's version: 1 until it is renewed."""
    return number(store, key_of("key-version", scope, text_of("name", name)), start=1)


def renew(store: Store, scope: str, name: object) -> int:
    """Raise the version, for good; return the new one."""
    return increment(store, key_of("key-version", scope, text_of("name", name)), start=1)
