"""The options of a task, their sources and their legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

from .outcomes import Classifier
from .policies import Exponential, FullJitter, Policy, Schedule, to_seconds

#: The setting with the adapters for messages from senders other than Celery.
FOREIGN = "foreign"

#: Settings in ``app.conf.sqs_backoff`` that are no options of a task. Other modules read them.
_APP_WIDE_ONLY = (
    *("store", "namespace", "secret", "encrypt"),
    FOREIGN,
    *("heartbeat", "prometheus_port", "prometheus_host", "status"),
    "ignore_findings",
)

DEAD_LETTER = "dead-letter"
FAIL = "fail"

#: How much of the exception is in a dead-letter record. ``full`` is type, message and traceback.
#: ``type`` is only the type.
FULL = "full"
TYPE_ONLY = "type"


class InvalidOption(ValueError):
    """An option that cannot be used. The message names it and its legal values.

    ``option`` is the option's name, or ``None`` if this package has no option of that name.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, kw_only=True)
class Options:
    """The validated options of one task. Times are seconds.

    Raises:
        InvalidOption: a value cannot be used; the message names the option and its range.
    """

    backoff: Policy = field(default_factory=FullJitter)
    retry_for: float | None = 36 * 3600.0
    max_retries: int | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    never_retry: tuple[type[BaseException], ...] = ()
    classify: tuple[Classifier, ...] = ()
    on_not_processed: Callable[..., object] | None = None
    on_give_up: str = DEAD_LETTER
    crash_budget: int = 3
    fifo_cap: float = 300.0
    park_above: float | None = 0.8
    record_detail: str = FULL
    redact: Callable[[str], str] | None = None
    #: A ``Provider``, its name, or ``None``. The annotation is ``Any``, because the package
    #: ``retry`` must not import that class.
    provider: Any = None

    def __post_init__(self) -> None:
        for name, (read, expected) in _OPTIONS.items():
            value = getattr(self, name)
            try:
                value = read(value)
            except (TypeError, ValueError) as exc:
                why = f"; {exc}" if isinstance(exc, _Hint) else ""
                raise InvalidOption(
                    f"invalid {name} {value!r}: expected {expected}{why}", name
                ) from None
            object.__setattr__(self, name, value)  # a frozen dataclass allows no other way

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options that ``app.conf.sqs_backoff`` may set."""
        return tuple(f.name for f in fields(cls) if f.name != "never_retry")

    @classmethod
    def resolve(
        cls, *, app_wide: object, own: Mapping[str, Any], setting: str = "sqs_backoff"
    ) -> Options:
        """Merge the task's own options, the app-wide options and our defaults, in this order.

        The first of the three that sets an option wins.

        Arguments:
            app_wide: the app's dict of options.
            own: the task's options.
            setting: the name under which the project has set ``app_wide``, for error messages.
        """
        known = (*cls.names(), *_APP_WIDE_ONLY)
        if not isinstance(app_wide, Mapping):
            raise InvalidOption(
                f"invalid {setting} of type {type(app_wide).__name__}: expected a dict of"
                f" {', '.join(known)}"
            )
        for name in app_wide:
            if name not in known:
                raise InvalidOption(
                    f"{setting}: unknown setting {name!r}{_suggest(name, known)};"
                    f" expected {', '.join(known)}"
                )
        if app_wide.get(FOREIGN) is not None:
            _check_foreign(app_wide[FOREIGN], setting)
        defaults = {name: value for name, value in app_wide.items() if name in cls.names()}
        try:
            return cls(**{**defaults, **own})
        except InvalidOption as exc:
            if exc.option in defaults and exc.option not in own:
                raise InvalidOption(f"{setting}: {exc}", exc.option) from exc
            raise

    @classmethod
    def refuse_misspelt(cls, given: Iterable[str]) -> None:
        """Refuse a keyword of ``@app.task`` that looks like a misspelt option of ours.

        Celery turns any keyword into an attribute, so a misspelt option would be ignored silently.
        """
        for name in given:
            if name not in cls.names() and (hint := _suggest(name, cls.names())):
                raise InvalidOption(f"unknown task option {name!r}{hint}")


def _check_foreign(value: object, setting: str) -> None:
    """Refuse a ``foreign`` setting that is not a dict of queue names and callables.

    An import string may take the place of a callable. It is not imported here.
    """
    is_legal = isinstance(value, Mapping) and all(
        isinstance(queue, str) and queue and (isinstance(target, str) or callable(target))
        for queue, target in value.items()
    )
    if not is_legal:
        raise InvalidOption(
            f"invalid foreign {value!r} in {setting}: expected a dict of queue name -> import"
            " string or callable (body, attributes)",
            FOREIGN,
        )


def _suggest(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), tuple(known), n=1, cutoff=0.8)
    return f" (did you mean {close[0]!r}?)" if close else ""


# Readers of options. A reader returns the value to keep, or raises if the value is not legal.


class _Hint(ValueError):
    """Raised for a value that is not legal, with a hint that the error's text shows."""


def _if(is_legal: Callable[[Any], object]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not is_legal(value):
            raise ValueError
        return value

    return read


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _is_provider(value: object) -> bool:
    return bool(value) if isinstance(value, str) else hasattr(value, "probe_interval")


def _exception_classes(value: Any) -> tuple[type[BaseException], ...]:
    classes = (value,) if isinstance(value, type) else tuple(value)
    if not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        raise ValueError
    return classes


def _classifiers(value: Any) -> tuple[Classifier, ...]:
    classifiers = (value,) if callable(value) else tuple(value)
    if not all(map(callable, classifiers)):
        raise ValueError
    for classifier in classifiers:
        if not _takes_one_argument(classifier):
            raise _Hint(f"did you mean {getattr(classifier, '__name__', repr(classifier))}()?")
    return classifiers


def _takes_one_argument(function: Callable[..., object]) -> bool:
    """Return whether a function can be called with one exception, as a classifier is.

    False for ``requests_errors``, which a user may pass by mistake for ``requests_errors()``.
    """
    try:
        signature(function).bind(Exception())
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


#: Each option's reader, and its legal values in words, for errors.
_OPTIONS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "backoff": (
        _if(lambda value: isinstance(value, Policy)),
        "a delay policy, such as FullJitter(base=2, cap=3600)",
    ),
    "retry_for": (
        _or_none(lambda value: to_seconds("retry_for", value)),
        "seconds or a timedelta from 0 up, or None: no limit",
    ),
    "max_retries": (_or_none(_if(_is_count)), "a whole number from 0 up, or None: no limit"),
    "retry_on": (_exception_classes, "an exception class or a tuple of them"),
    "never_retry": (_exception_classes, "an exception class or a tuple of them"),
    "classify": (
        _classifiers,
        "a callable (exc) -> Outcome, Verdict or None, or a tuple of them",
    ),
    "on_not_processed": (_or_none(_if(callable)), "a callable (task, exc, args, kwargs), or None"),
    "on_give_up": (_if((DEAD_LETTER, FAIL).__contains__), f"{DEAD_LETTER!r} or {FAIL!r}"),
    "crash_budget": (
        _if(lambda value: _is_count(value) and value > 0),
        "a whole number from 1 up",
    ),
    "fifo_cap": (
        lambda value: to_seconds("fifo_cap", value, may_be_zero=False),
        "seconds or a timedelta above 0",
    ),
    "park_above": (_or_none(_if(_is_share)), "a share above 0, up to 1, or None: never"),
    "record_detail": (_if((FULL, TYPE_ONLY).__contains__), f"{FULL!r} or {TYPE_ONLY!r}"),
    "redact": (_or_none(_if(callable)), "a callable (text) -> text, or None"),
    "provider": (_or_none(_if(_is_provider)), "a Provider, its name, or None"),
}


#: Keywords of ``@app.task`` that belong to Celery, although ``celery.Task`` has no attributes of
#: these names.
AUTORETRY_OPTIONS = (
    "autoretry_for",
    "dont_autoretry_for",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
)


def options_from_autoretry(task: Any) -> dict[str, Any]:
    """Return the options that replace Celery's ``autoretry_for`` and ``retry_...`` on a task.

    The result is empty without ``autoretry_for``. The delays are the same as in Celery. The option
    ``retry_backoff`` is the first ceiling of the delay in seconds (``True`` = 1). The ceiling
    doubles up to ``retry_backoff_max`` (default 600). The delay is drawn with full jitter, unless
    ``retry_jitter`` is false. Without ``retry_backoff``, each delay is the ``countdown`` in
    ``retry_kwargs``, or ``default_retry_delay`` (180 seconds) if ``retry_kwargs`` has none.
    """
    autoretry_for = tuple(getattr(task, "autoretry_for", ()))
    if not autoretry_for:
        return {}
    kwargs = dict(getattr(task, "retry_kwargs", {}))
    options: dict[str, Any] = {
        "retry_on": autoretry_for,
        "never_retry": tuple(getattr(task, "dont_autoretry_for", ())),
    }
    if backoff := getattr(task, "retry_backoff", False):
        shape = FullJitter if getattr(task, "retry_jitter", True) else Exponential
        cap = max(1, getattr(task, "retry_backoff_max", 600))
        options["backoff"] = shape(base=min(int(max(1.0, backoff)), cap), cap=cap)
    else:
        options["backoff"] = Schedule([kwargs.get("countdown", task.default_retry_delay)])
    if "max_retries" in kwargs:
        options["max_retries"] = kwargs["max_retries"]
    return options
