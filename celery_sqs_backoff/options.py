"""The options of a task: where each comes from, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NoReturn

from celery.exceptions import ImproperlyConfigured

from .budget import receives_needed
from .outcomes import Classifier
from .policies import FullJitter, Policy, to_seconds

__all__ = ["DEAD_LETTER", "FAIL", "STORE", "Options"]

#: The setting beside the options in ``app.conf.sqs_backoff``: see ``safe.stores``.
STORE = "store"

DEAD_LETTER = "dead-letter"
FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The validated options of one task. Times are seconds.

    Raises:
        ImproperlyConfigured: a value is not legal; the message names the option and its range.
    """

    backoff: Policy = field(default_factory=FullJitter)
    retry_for: float | None = 36 * 3600.0
    max_retries: int | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    never_retry: tuple[type[BaseException], ...] = ()
    classify: tuple[Classifier, ...] = ()
    undo: Callable[..., object] | None = None
    on_give_up: str = DEAD_LETTER
    crash_budget: int = 3
    fifo_cap: float = 300.0
    park_above: float | None = 0.8

    def __post_init__(self) -> None:
        put = object.__setattr__  # the way to normalise a frozen dataclass
        if not isinstance(self.backoff, Policy):
            _refuse("backoff", self.backoff, "a delay policy, such as FullJitter(base=2, cap=3600)")
        put(self, "retry_for", _seconds("retry_for", self.retry_for))
        if self.max_retries is not None and not _is_count(self.max_retries):
            _refuse("max_retries", self.max_retries, "a whole number from 0 up, or None: no limit")
        for name in ("retry_on", "never_retry"):
            put(self, name, _exception_classes(name, getattr(self, name)))
        put(self, "classify", _callables("classify", self.classify))
        if self.undo is not None and not callable(self.undo):
            _refuse("undo", self.undo, "a callable (task, exc, args, kwargs), or None")
        if self.on_give_up not in (DEAD_LETTER, FAIL):
            _refuse("on_give_up", self.on_give_up, f"{DEAD_LETTER!r} or {FAIL!r}")
        if not _is_count(self.crash_budget) or self.crash_budget < 1:
            _refuse("crash_budget", self.crash_budget, "a whole number from 1 up")
        put(self, "fifo_cap", _seconds_above_0("fifo_cap", self.fifo_cap))
        if self.park_above is not None and not _is_share(self.park_above):
            _refuse("park_above", self.park_above, "a share above 0, up to 1, or None: never")

    @cached_property
    def receives_needed(self) -> int:
        """About how many receives a message may need (see :func:`.budget.receives_needed`)."""
        return receives_needed(self.backoff, retry_for=self.retry_for, max_retries=self.max_retries)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names that ``app.conf.sqs_backoff`` may set."""
        return tuple(f.name for f in fields(cls) if f.name != "never_retry")

    @classmethod
    def resolve(cls, *, app_wide: object, own: Mapping[str, Any]) -> Options:
        """Merge what the task says itself over the app-wide defaults over ours."""
        if not isinstance(app_wide, Mapping):
            raise ImproperlyConfigured(
                f"sqs_backoff must be a dict of {', '.join(cls.names())}, not {app_wide!r}"
            )
        app_wide = {name: value for name, value in app_wide.items() if name != STORE}
        for name in app_wide:
            if name not in cls.names():
                raise ImproperlyConfigured(
                    f"sqs_backoff: unknown setting {name!r}{_did_you_mean(name)};"
                    f" known are {', '.join(cls.names())}"
                )
        return cls(**{**app_wide, **own})

    @classmethod
    def refuse_misspelt(cls, given: Iterable[str]) -> None:
        """Refuse a keyword of ``@app.task`` that is nearly, but not quite, one of ours.

        Celery turns any keyword into an attribute, so a misspelt option would do nothing, silently.
        """
        for name in given:
            if name not in cls.names() and _close(name):
                raise ImproperlyConfigured(f"unknown task option {name!r}{_did_you_mean(name)}")


def _refuse(name: str, value: object, legal: str) -> NoReturn:
    raise ImproperlyConfigured(f"{name}={value!r} is not legal: it must be {legal}")


def _close(name: str) -> list[str]:
    return get_close_matches(name, Options.names(), n=1, cutoff=0.8)


def _did_you_mean(name: object) -> str:
    close = _close(str(name))
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _seconds_above_0(name: str, value: object) -> float:
    seconds = None if value is None else _seconds(name, value)
    if not seconds:
        _refuse(name, value, "seconds or a timedelta above 0")
    return seconds


def _seconds(name: str, value: object) -> float | None:
    try:
        return None if value is None else to_seconds(name, value)
    except (TypeError, ValueError):
        _refuse(name, value, "seconds or a timedelta from 0 up, or None: no limit")


def _exception_classes(name: str, value: object) -> tuple[type[BaseException], ...]:
    classes = (value,) if isinstance(value, type) else value
    legal = "an exception class or a tuple of them"
    if not isinstance(classes, Iterable):
        _refuse(name, value, legal)
    classes = tuple(classes)
    if not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        _refuse(name, value, legal)
    return classes


def _callables(name: str, value: object) -> tuple[Any, ...]:
    callables = (value,) if callable(value) else value
    legal = "a callable (exc) -> Outcome, Verdict or None, or a tuple of them"
    if not isinstance(callables, Iterable):
        _refuse(name, value, legal)
    callables = tuple(callables)
    if not all(callable(c) for c in callables):
        _refuse(name, value, legal)
    return callables
