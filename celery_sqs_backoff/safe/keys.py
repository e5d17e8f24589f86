"""The id under which a provider is asked to do something once, on every attempt the same."""

from __future__ import annotations

import json
from uuid import NAMESPACE_URL, uuid5

from .store import Store, increment, key_of, number

__all__ = ["idempotency_key", "renew", "version"]

_NAMESPACE = uuid5(NAMESPACE_URL, "https://pypi.org/project/celery-sqs-backoff/")


def idempotency_key(scope: str, name: str, version: int) -> str:
    """Derive the key: a UUID, the same for the same three on every machine."""
    return str(uuid5(_NAMESPACE, json.dumps([scope, name, version])))


def version(store: Store, scope: str, name: str) -> int:
    """Which version the key is at: 1 until it is renewed."""
    return number(store, key_of("key-version", scope, name), start=1)


def renew(store: Store, scope: str, name: str) -> int:
    """Raise the version, for good; return the new one."""
    return increment(store, key_of("key-version", scope, name), start=1)
