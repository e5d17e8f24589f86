"""Turn names, keys and the arguments of calls into text, and derive idempotency keys.

All functions are pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID, uuid5

#: Namespace of all derived UUIDs. Never change it: providers recognise calls by these UUIDs.
NAMESPACE = UUID("52c2d7a4-55a3-5c5c-8a4e-4f4f8ab0a9a1")

_SCALARS = (str, int, float, bool, type(None))
_TEXTUAL = (Decimal, UUID, date, datetime, time, timedelta)


def text_of(what: str, value: object) -> str:
    """Return a name, key or scope as text.

    Arguments:
        what: the argument's name, for the error's text.
        value: an int, a UUID or non-empty text. ``7`` and ``"7"`` are the same name, and so are a
            UUID and its text.

    Raises:
        TypeError: the value is something else, such as ``None``.
        ValueError: the value is empty text.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(f"invalid {what} {value!r}: expected text, an int or a UUID")
    text = str(value)
    if not text:
        raise ValueError(f"invalid {what} '': expected text, an int or a UUID")
    return text


def idempotency_key(namespace: str, scope: str, name: object, version: int) -> str:
    """Derive a UUID from the arguments. Equal arguments give the same UUID on every machine.

    Raises:
        TypeError: ``name`` is not text, an int or a UUID.
        ValueError: ``name`` is empty.
    """
    parts = [namespace, scope, text_of("name", name), version]
    return str(uuid5(NAMESPACE, json.dumps(parts)))


def input_of(
    fn: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the arguments of a call as JSON.

    A step uses the JSON to find out whether an earlier run began it with the same arguments. If
    ``fn`` is a ``partial``, the JSON includes the arguments of the ``partial``. Text, numbers,
    dates, decimals and UUIDs are in the JSON with their values, also inside lists and dicts. A
    Django model is there with its class and primary key, and any other object only with its class.
    """
    while isinstance(fn, partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    return json.dumps([_plain(list(args)), _plain(dict(kwargs))], sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return [_name(value), value.name]
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, _TEXTUAL):
        return {"as text": str(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"dict": sorted(([str(k), _plain(v)] for k, v in value.items()), key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((_plain(item) for item in value), key=str)}
    if (key := getattr(value, "pk", None)) is not None:
        return {_name(value): str(key)}
    return {"class": _name(value)}


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
