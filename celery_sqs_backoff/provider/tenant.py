"""Finds the tenant of a call, which is the value of one argument of the task."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from hashlib import sha256
from typing import Any

#: Only this many characters of a tenant count. The rest is cut off.
_MOST_CHARACTERS = 500


def check_key(key: str, function: Callable[..., object]) -> None:
    """Check that calls of a function can have an argument with this name.

    Raises:
        ValueError: the function has no such argument. The text lists its arguments.
    """
    signature = _signature_of(function)
    if signature is None:
        return
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = [name for name, kind in kinds.items() if kind not in collecting]
    if key not in known and inspect.Parameter.VAR_KEYWORD not in kinds.values():
        raise ValueError(
            f"invalid key {key!r}: the task has no such argument;"
            f" expected one of {', '.join(known) or 'its arguments, but it has none'}"
        )


def tenant_of(key: str, function: Callable[..., object], payload: Any) -> str:
    """Return the tenant of a call. It is empty if the argument is missing or ``None``.

    Arguments:
        key: the argument's name.
        function: the task's function, without ``self``.
        payload: the decoded body of a Celery message, which is ``(args, kwargs, embed)``. If it
            has another form, the tenant is empty.
    """
    is_call = isinstance(payload, list | tuple) and len(payload) > 1
    args, kwargs = payload[:2] if is_call else ((), {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        return ""
    signature = _signature_of(function)
    if key in kwargs:
        value = kwargs[key]
    elif signature is None:
        return ""
    else:
        try:
            call = signature.bind_partial(*args, **kwargs)
        except TypeError:  # the arguments do not fit the function, so the task will fail
            return ""
        call.apply_defaults()
        value = call.arguments.get(key)
    return "" if value is None else str(value)[:_MOST_CHARACTERS]


@functools.lru_cache(maxsize=256)
def _signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def digest_of(tenant: str) -> str:
    """Return a short hash of a tenant for logs and events, which must not show arguments."""
    return sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:8]
