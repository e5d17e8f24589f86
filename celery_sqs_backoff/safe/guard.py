"""May this message do it? Another may have done it a moment ago: check-and-set, and unset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from string import Formatter
from typing import Any

from celery.exceptions import ImproperlyConfigured

from ..policies import to_seconds
from .errors import Refused
from .store import Store, key_of

__all__ = ["Guard", "check_and_set", "unset"]


def check_and_set(store: Store, key: str, holder: str, window: float) -> None:
    """Let one holder pass per window; the same one as often as it comes.

    Arguments:
        key: of what is guarded, such as ``"mail:7"``.
        holder: who asks. A message that is delivered again must give the same.
        window: seconds above 0, from the first time the holder passed.

    Raises:
        Refused: another holder has passed.
        StoreUnavailable: nothing is known.
    """
    there = store.add(key_of("guard", key), holder, window)
    if there not in (None, holder):
        why = f"another message has passed this guard within its window of {window:g} s"
        raise Refused({"refused": why, "passed": there})


def unset(store: Store, key: str, holder: str) -> bool:
    """Take the holder's record back, and nobody else's; whether there was one."""
    return store.delete(key_of("guard", key), holder)


@dataclass(frozen=True, init=False)
class Guard:
    """The task option: at most one message per key and window gets to run.

    Arguments:
        key: a string with the task's arguments in braces, ``"mail:{customer_id}"``, or a callable
            that gets the task's arguments and returns a string. Tasks with the same key guard
            each other.
        window: seconds or timedelta above 0.

    The record is made before the run, in the name of the Celery task id: the same message passes
    again, however often it is delivered, retried or redriven. It is taken back when the failure
    says that nothing was processed (RETRYABLE, NOT_PROCESSED), never when it may have been.

    Raises:
        ImproperlyConfigured: ``key`` or ``window`` is not legal.
    """

    key: str | Callable[..., str]
    window: float

    def __init__(self, *, key: str | Callable[..., str], window: float | timedelta) -> None:
        if not key or not (isinstance(key, str) or callable(key)):
            _refuse("key", key, "a string such as 'mail:{customer_id}', or a callable")
        try:
            seconds = to_seconds("window", window)
        except (TypeError, ValueError):
            seconds = 0.0
        if not seconds:
            _refuse("window", window, "seconds or a timedelta above 0")
        object.__setattr__(self, "key", key)  # the way to fill a frozen dataclass
        object.__setattr__(self, "window", seconds)

    def check(self, signature: inspect.Signature) -> None:
        """Refuse a key with an argument that the task does not have."""
        if isinstance(self.key, str):
            for _, field, _, _ in Formatter().parse(self.key):
                name = None if field is None else field.partition(".")[0].partition("[")[0]
                if name is not None and name not in signature.parameters:
                    names = ", ".join(signature.parameters) or "none"
                    _refuse("key", self.key, f"of the task's arguments ({names})")

    def key_for(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the key of one call of the task."""
        if callable(self.key):
            return str(self.key(*args, **kwargs))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.key.format_map(bound.arguments)


def _refuse(name: str, value: object, legal: str) -> None:
    raise ImproperlyConfigured(f"guard: {name}={value!r} is not legal: it must be {legal}")
