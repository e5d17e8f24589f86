"""The options of a task: where each comes from, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, NoReturn

from .budget import receives_needed
from .outcomes import Classifier
from .policies import Exponential, FullJitter, Policy, Schedule, to_seconds

#: Settings beside the options in ``app.conf.sqs_backoff``: see ``store.settings``.
SAFE_SETTINGS = ("store", "namespace", "secret", "encrypt")

#: Another one: what makes tasks of messages that other senders wrote.
FOREIGN = "foreign"

#: The settings that ``worker.observation`` reads.
OBSERVE_SETTINGS = ("heartbeat", "prometheus_port", "prometheus_host", "status")

#: What ``sqs-doctor`` is not to report.
IGNORE_FINDINGS = "ignore_findings"

_APP_WIDE_ONLY = (*SAFE_SETTINGS, FOREIGN, *OBSERVE_SETTINGS, IGNORE_FINDINGS)

DEAD_LETTER = "dead-letter"
FAIL = "fail"

#: What a dead-letter record says of the exception: everything, or its type only.
FULL = "full"
TYPE_ONLY = "type"


class InvalidOption(ValueError):
    """An option that cannot be used; the message names it and says what is expected.

    ``option`` is its name, if it is one of ours.
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
    undo: Callable[..., object] | None = None
    on_give_up: str = DEAD_LETTER
    crash_budget: int = 3
    fifo_cap: float = 300.0
    park_above: float | None = 0.8
    record_detail: str = FULL
    redact: Callable[[str], str] | None = None
    #: A ``provider.Provider``, or its name; that room lies above this one.
    provider: Any = None

    def __post_init__(self) -> None:
        put = object.__setattr__  # the way to normalise a frozen dataclass
        if not isinstance(self.backoff, Policy):
            _refuse("backoff", self.backoff, "a delay policy, such as FullJitter(base=2, cap=3600)")
        put(self, "retry_for", _seconds("retry_for", self.retry_for))
        if self.max_retries is not None and not _is_count(self.max_retries):
            _refuse("max_retries", self.max_retries, "a whole number from 0 up, or None: no limit")
        for name in ("retry_on", "never_retry"):
            put(self, name, _exception_classes(name, getattr(self, name)))
        put(self, "classify", _classifiers(self.classify))
        if self.undo is not None and not callable(self.undo):
            _refuse("undo", self.undo, "a callable (task, exc, args, kwargs), or None")
        if self.on_give_up not in (DEAD_LETTER, FAIL):
            _refuse("on_give_up", self.on_give_up, f"{DEAD_LETTER!r} or {FAIL!r}")
        if not _is_count(self.crash_budget) or self.crash_budget < 1:
            _refuse("crash_budget", self.crash_budget, "a whole number from 1 up")
        put(self, "fifo_cap", _seconds_above_0("fifo_cap", self.fifo_cap))
        if self.park_above is not None and not _is_share(self.park_above):
            _refuse("park_above", self.park_above, "a share above 0, up to 1, or None: never")
        if self.record_detail not in (FULL, TYPE_ONLY):
            _refuse("record_detail", self.record_detail, f"{FULL!r} or {TYPE_ONLY!r}")
        if self.redact is not None and not callable(self.redact):
            _refuse("redact", self.redact, "a callable (text) -> text, or None")

        is_provider = isinstance(self.provider, str) or hasattr(self.provider, "thresholds")
        if self.provider is not None and (not is_provider or not self.provider):
            _refuse("provider", self.provider, "a Provider, its name, or None")

    def receives_needed(self, *, at_most: int) -> int:
        """About how many receives a message may need (see :func:`.budget.receives_needed`)."""
        return receives_needed(
            self.backoff, retry_for=self.retry_for, max_retries=self.max_retries, at_most=at_most
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names that ``app.conf.sqs_backoff`` may set."""
        return tuple(f.name for f in fields(cls) if f.name != "never_retry")

    @classmethod
    def resolve(
        cls, *, app_wide: object, own: Mapping[str, Any], setting: str = "sqs_backoff"
    ) -> Options:
        """Merge what the task says itself over the app-wide defaults over ours.

        Arguments:
            app_wide: the app's dict of options.
            own: the task's.
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
                    f"{setting}: unknown setting {name!r}{_did_you_mean(name, known)};"
                    f" expected {', '.join(known)}"
                )
        check_foreign(app_wide.get(FOREIGN), setting)
        defaults = {name: value for name, value in app_wide.items() if name in cls.names()}
        try:
            return cls(**{**defaults, **own})
        except InvalidOption as exc:
            if exc.option in defaults and exc.option not in own:
                raise InvalidOption(f"{setting}: {exc}", exc.option) from exc
            raise

    @classmethod
    def refuse_misspelt(cls, given: Iterable[str]) -> None:
        """Refuse a keyword of ``@app.task`` that is nearly, but not quite, one of ours.

        Celery turns any keyword into an attribute, so a misspelt option would do nothing, silently.
        """
        for name in given:
            if name not in cls.names() and _close(name, cls.names()):
                raise InvalidOption(
                    f"unknown task option {name!r}{_did_you_mean(name, cls.names())}"
                )


def check_foreign(value: object, setting: str = "sqs_backoff") -> None:
    """Refuse a ``foreign`` setting that is no dict of queue names and callables.

    Raises:
        InvalidOption: see above. Import strings are not imported here.
    """
    if value is None:
        return
    expected = "a dict of queue name -> import string or callable (body, attributes)"
    if not isinstance(value, Mapping):
        raise InvalidOption(f"invalid foreign {value!r} in {setting}: expected {expected}", FOREIGN)
    for queue, target in value.items():
        is_target = isinstance(target, str) or callable(target)
        if not isinstance(queue, str) or not queue or not is_target:
            raise InvalidOption(
                f"invalid foreign entry {queue!r}: {target!r} in {setting}: expected {expected}",
                FOREIGN,
            )


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise InvalidOption(f"invalid {name} {value!r}: expected {expected}", name)


def _close(name: object, known: Iterable[str]) -> list[str]:
    return get_close_matches(str(name), tuple(known), n=1, cutoff=0.8)


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    close = _close(name, known)
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


def _classifiers(value: object) -> tuple[Classifier, ...]:
    classifiers = (value,) if callable(value) else value
    expected = "a callable (exc) -> Outcome, Verdict or None, or a tuple of them"
    if not isinstance(classifiers, Iterable):
        _refuse("classify", value, expected)
    classifiers = tuple(classifiers)
    if not all(callable(c) for c in classifiers):
        _refuse("classify", value, expected)
    for classifier in classifiers:
        if not _takes_one_argument(classifier):
            name = getattr(classifier, "__name__", repr(classifier))
            _refuse("classify", classifier, f"{expected}; did you mean {name}()?")
    return classifiers


def _takes_one_argument(function: Callable[..., object]) -> bool:
    """Whether it can be called with an exception. A factory of a classifier cannot."""
    try:
        signature(function).bind(Exception())
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say
        return True
    return True


#: Keywords of ``@app.task`` that are Celery's, although ``celery.Task`` has no such attributes.
AUTORETRY_OPTIONS = (
    "autoretry_for",
    "dont_autoretry_for",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
)


def options_from_autoretry(task: Any) -> dict[str, Any]:
    """Translate ``autoretry_for`` and its family into options; ``{}`` if the task has none.

    The delays are those of Celery's ``add_autoretry_behaviour``: ``retry_backoff`` is the base, in
    seconds (``True`` = 1), of an exponential capped at ``retry_backoff_max`` (default 600), with
    full jitter unless ``retry_jitter`` is false; without it every delay is the ``countdown`` of
    ``retry_kwargs``, else ``default_retry_delay`` (180 seconds).
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
        base = int(max(1.0, backoff))
        options["backoff"] = shape(
            base=base, cap=max(base, getattr(task, "retry_backoff_max", 600))
        )
    else:
        options["backoff"] = Schedule([kwargs.get("countdown", task.default_retry_delay)])
    if "max_retries" in kwargs:
        options["max_retries"] = kwargs["max_retries"]
    return options
