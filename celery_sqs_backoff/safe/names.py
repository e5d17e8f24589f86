"""What a key, a name or an input is as text: the same on every machine, never ambiguous. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID

__all__ = ["input_of", "text_of"]

_SCALARS = (str, int, float, bool, type(None))
_TEXTUAL = (Decimal, UUID, date, datetime, time, timedelta)


def text_of(what: str, value: object) -> str:
    """Return a name, key or scope as text.

    Arguments:
        what: the argument's name, for the error.
        value: text that is not empty, an int or a UUID. ``7`` and ``"7"`` are the same name, and
            so are a UUID and its text.

    Raises:
        TypeError: it is something else, such as ``None``.
        ValueError: it is empty.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(f"invalid {what} {value!r}: expected text, an int or a UUID")
    text = str(value)
    if not text:
        raise ValueError(f"invalid {what} '': expected text, an int or a UUID")
    return text


def input_of(
    fn: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return what a call is given, as JSON: its arguments, and those of a ``partial``.

    Text, numbers, dates, decimals and UUIDs count by value, also inside lists and dicts, and a
    Django model by its class and primary key. Of any other object only the class counts.

    A lambda or inner function is given what it names of the function around it, and its defaults,
    too. Of these only such values count, and no lists, dicts or other objects: they may change
    while the run goes on. The defaults of other functions change only with the code.
    """
    while isinstance(fn, partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    given = [_plain(list(args)), _plain(dict(kwargs))]
    if enclosed := {name: _plain(value) for name, value in _enclosed(fn) if _is_value(value)}:
        given.append(enclosed)
    return json.dumps(given, sort_keys=True)


def _enclosed(fn: Any) -> Iterator[tuple[str, Any]]:
    """The variables that an inner function has from the one around it, and its defaults."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    if "<" not in getattr(fn, "__qualname__", "<"):
        return
    positional = code.co_varnames[: code.co_argcount]
    defaults = fn.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


def _is_value(value: object) -> bool:
    return isinstance(value, (*_SCALARS, *_TEXTUAL, bytes, Enum)) or (
        getattr(value, "pk", None) is not None
    )


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
