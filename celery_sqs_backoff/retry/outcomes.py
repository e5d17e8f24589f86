"""Decides whether a failed task may run again, and whether its effects may be undone.

Every error gets one of three outcomes. An error is RETRYABLE only if it is a ``Retryable``, or if a
rule of the task (``classify``, ``retry_on``) says so. If no rule knows an error, the work may have
been processed, so the task does not run again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

from .policies import to_seconds

logger = logging.getLogger(__name__)


class Outcome(Enum):
    """Whether the task's work was processed when the task failed, and whether a retry can help.

    * ``RETRYABLE``: the work was not processed, and a later attempt may succeed (the provider is
      down, or throttles). The task is undone (``on_not_processed``) and retried.
    * ``NOT_PROCESSED``: the work was certainly not processed, and no retry will help (bad
      credentials, an address that does not exist). The task is undone and given up.
    * ``UNKNOWN``: the work may have been processed (a timeout after the request was sent), or no
      rule knows this error. The task is not undone, and is given up unless the call is safe to
      repeat, because one lost mail is better than two mails.
    """

    RETRYABLE = "retryable"
    NOT_PROCESSED = "not processed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, init=False)
class Verdict:
    """An outcome, how long the provider asks to wait, and whether the call is safe to repeat.

    "Nothing was processed" and "safe to repeat" are two facts. An idempotent call that timed out
    may have been processed and can still be repeated. Its verdict is
    ``Verdict(Outcome.UNKNOWN, safe_to_repeat=True)``.

    Arguments:
        outcome: one of ``Outcome``.
        retry_after: seconds or timedelta, from 0 up; kept as float seconds. A retry waits at least
            this long, plus jitter. Ignored if the failure is not retried. ``None`` (default) = the
            provider did not ask.
        safe_to_repeat: ``True`` = retry an UNKNOWN failure, without an undo and without releasing
            the task's ``Guard``. If no retry succeeds, the dead-letter record says UNKNOWN. Default
            ``False``. Ignored for the other outcomes, which already decide whether to retry.

    Raises:
        TypeError: ``outcome`` is not an ``Outcome``, ``retry_after`` is not a number or a
            timedelta, or ``safe_to_repeat`` is not a bool.
        ValueError: ``retry_after`` is negative, infinite or NaN.
    """

    outcome: Outcome
    retry_after: float | None
    safe_to_repeat: bool

    def __init__(
        self,
        outcome: Outcome,
        retry_after: float | timedelta | None = None,
        *,
        safe_to_repeat: bool = False,
    ) -> None:
        if not isinstance(outcome, Outcome):
            raise TypeError(f"invalid outcome {outcome!r}: expected an Outcome")
        if not isinstance(safe_to_repeat, bool):
            raise TypeError(f"invalid safe_to_repeat {safe_to_repeat!r}: expected a bool")
        seconds = None if retry_after is None else to_seconds("retry_after", retry_after)
        object.__setattr__(self, "outcome", outcome)  # a frozen dataclass allows no other way
        object.__setattr__(self, "retry_after", seconds)
        object.__setattr__(self, "safe_to_repeat", safe_to_repeat)

    @property
    def wants_retry(self) -> bool:
        """Whether the task is retried, as long as its budgets allow it."""
        return self.outcome is Outcome.RETRYABLE or (
            self.outcome is Outcome.UNKNOWN and self.safe_to_repeat
        )

    @property
    def nothing_was_processed(self) -> bool:
        """Whether it is certain that the call was not processed.

        If so, ``on_not_processed`` may be called, and the task's ``Guard`` may be released.
        """
        return self.outcome is not Outcome.UNKNOWN


#: Returns the outcome or verdict of an exception, or ``None`` if it does not know the exception.
Classifier: TypeAlias = Callable[[BaseException], Outcome | Verdict | None]


class ExplicitOutcome(Exception):
    """An exception that carries its own verdict, which wins over every classifier."""

    @property
    def verdict(self) -> Verdict:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions may leave a pool process pickled. By default, pickle calls the class with
        # ``args``, which fails for a subclass with another constructor.
        return _unpickle, (type(self), self.args), self.__dict__


def _unpickle(cls: type[ExplicitOutcome], args: tuple[Any, ...]) -> ExplicitOutcome:
    return cls.__new__(cls, *args)


class Retryable(ExplicitOutcome):
    """Raise this in a task if the work was not processed and the task should run again later.

    Arguments:
        msg: for readers of the log and the dead-letter record.
        retry_after: how long the provider asked to wait, seconds or timedelta, from 0 up. The retry
            waits at least this long, plus jitter. Kept as float seconds. ``None`` (default) = the
            provider did not ask.

    Raises:
        TypeError: ``retry_after`` is not a number or a timedelta.
        ValueError: ``retry_after`` is negative, infinite or NaN.
    """

    retry_after: float | None = None

    def __init__(self, msg: str = "", retry_after: float | timedelta | None = None) -> None:
        super().__init__(msg)
        if retry_after is not None:
            self.retry_after = to_seconds("retry_after", retry_after)

    @property
    def verdict(self) -> Verdict:
        """RETRYABLE, with ``retry_after``."""
        return Verdict(Outcome.RETRYABLE, self.retry_after)


class NonRetryable(ExplicitOutcome):
    """Raise this in a task if no retry will help.

    Arguments:
        msg: for readers of the log and the dead-letter record.
        not_processed: ``True`` = the work was certainly not processed; ``False`` (default) = it may
            have been.

    Raises:
        TypeError: ``not_processed`` is not a bool.
    """

    not_processed: bool = False

    def __init__(self, msg: str = "", not_processed: bool = False) -> None:
        super().__init__(msg)
        if not isinstance(not_processed, bool):
            raise TypeError(f"invalid not_processed {not_processed!r}: expected a bool")
        self.not_processed = not_processed

    @property
    def verdict(self) -> Verdict:
        """NOT_PROCESSED if ``not_processed``, else UNKNOWN."""
        return Verdict(Outcome.NOT_PROCESSED if self.not_processed else Outcome.UNKNOWN)


def judge(
    exc: BaseException,
    *,
    classify: Iterable[Classifier] = (),
    retry_on: Iterable[type[BaseException]] = (),
    never_retry: Iterable[type[BaseException]] = (),
    task: str | None = None,
) -> Verdict | None:
    """Return the verdict on a failure, or ``None`` if no rule knows it. The first match wins.

    1. the exception itself, if it is a ``Retryable`` or ``NonRetryable``;
    2. the ``classify`` callables, in order;
    3. ``never_retry``: ``None`` for these classes and their subclasses;
    4. ``retry_on``: RETRYABLE for these classes and their subclasses.

    If a classifier raises, or returns anything but an ``Outcome``, a ``Verdict`` or ``None``, this
    function logs ``sqs_backoff.classifier_broken`` and asks the next rule. So a broken
    classifier never causes a retry by itself. A later rule may still cause a retry.

    Rules 3 and 4 look only at the exception itself, not at its ``__cause__`` or ``__context__``.
    The reason is that a wrapped error may have happened after the work was done. A classifier may
    look at the wrapped error.

    Arguments:
        task: the task's name, for the log line.
    """
    for classifier in (_explicit_verdict, *classify):
        verdict = _ask(classifier, exc, task)
        if verdict is not None:
            return verdict
    if isinstance(exc, tuple(retry_on)) and not isinstance(exc, tuple(never_retry)):
        return Verdict(Outcome.RETRYABLE)
    return None


def _explicit_verdict(exc: BaseException) -> Verdict | None:
    return exc.verdict if isinstance(exc, ExplicitOutcome) else None


def _ask(classifier: Classifier, exc: BaseException, task: str | None) -> Verdict | None:
    try:
        answer: object = classifier(exc)
    except Exception as error:  # noqa: BLE001  # a classifier's bug must not hide the failure
        end = f"raised {_name(type(error))}"
    else:
        if isinstance(answer, Outcome):
            return Verdict(answer)
        if answer is None or isinstance(answer, Verdict):
            return answer
        end = f"returned {_name(type(answer))}"
    # Log only types and no traceback, because an error's text and arguments may be user data.
    logger.error(
        "sqs_backoff.classifier_broken: task %s: %s %s for %s;"
        " expected an Outcome, a Verdict or None",
        *(task or "?", _name(classifier), end, _name(type(exc))),
    )
    return None


def _name(thing: object) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
