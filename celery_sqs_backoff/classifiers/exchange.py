"""Diagnose how far a call to a provider got before it failed, and whether to repeat the call.

Each library has an ordered table of rules for its errors. The first rule that fits an error gives
its meaning. The documentation prints the same table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from ..retry.outcomes import Outcome, Verdict


class Meaning(Enum):
    """Whether the provider processed a failed call. The value is a text for the documentation."""

    NOT_SENT = "nothing was sent"
    REFUSED_FOR_NOW = "refused for now"
    REFUSED = "refused, or cannot be sent"
    UNAVAILABLE = "503, perhaps from a gateway that had passed the request on"
    IN_DOUBT = "may have been processed"
    CONFLICT = "an earlier attempt under the same key may have been processed"

    def outcome(self, *, trust_503: bool = False) -> Outcome:
        """Return the outcome RETRYABLE, NOT_PROCESSED or UNKNOWN.

        ``trust_503``: whether UNAVAILABLE is RETRYABLE. Default ``False``: it is UNKNOWN.
        """
        if self is Meaning.REFUSED:
            return Outcome.NOT_PROCESSED
        if self in (Meaning.IN_DOUBT, Meaning.CONFLICT):
            return Outcome.UNKNOWN
        if self is Meaning.UNAVAILABLE and not trust_503:
            return Outcome.UNKNOWN
        return Outcome.RETRYABLE


@dataclass(frozen=True)
class Diagnosis:
    """A meaning, and the seconds that the provider asked to wait (``None`` = it did not ask)."""

    meaning: Meaning
    retry_after_seconds: float | None = None

    def verdict(self, *, idempotent: bool, trust_503: bool = False) -> Verdict:
        """Return the verdict on the failed call.

        If the outcome is UNKNOWN, the call may have been processed. If such a call is idempotent,
        the task is retried, and ``on_not_processed`` is not called. After a CONFLICT the task is
        not retried, because the provider would refuse the same key again.
        """
        outcome = self.meaning.outcome(trust_503=trust_503)
        repeat = idempotent and outcome is Outcome.UNKNOWN and self.meaning is not Meaning.CONFLICT
        is_retried = repeat or outcome is Outcome.RETRYABLE
        floor = self.retry_after_seconds if is_retried else None
        return Verdict(outcome, floor, safe_to_repeat=repeat)


#: Texts that occur in the tables of several libraries. The documentation prints them.
UNTRUSTED = "an untrusted certificate, or a proxy that requires credentials (407)"
NOT_CONNECTED = (
    "DNS, no connection in time, a refused connection, a proxy's tunnel, the TLS handshake"
)

#: Reads the diagnosis from the error, for example from its HTTP status. ``None`` = no diagnosis.
Reader: TypeAlias = Callable[[Any], Diagnosis | None]


@dataclass(frozen=True)
class ErrorRule:
    """A row of a library's table.

    Args:
        module: the module of the classes. The rule never imports the module. As long as the
            module is not loaded, no error of its classes can occur.
        names: names of the classes, separated by spaces. The rule also fits their subclasses. A
            class that the installed version lacks is ignored.
        means: a meaning, or a function that reads a diagnosis from the error. ``None`` = the error
            is not classified, and no later rule is tried.
        when: the condition, or the part of the error that is read, as a text for the documentation.
        applies: returns whether the condition holds. ``None`` (default) = no condition.
        asked_seconds: returns the seconds that the provider asked to wait. Used only if ``means``
            is a meaning. ``None`` (default) = the provider cannot ask.
    """

    module: str
    names: str
    means: Meaning | Reader | None
    when: str = ""
    applies: Callable[[Any], bool] | None = None
    asked_seconds: Callable[[Any], float | None] | None = None

    def fits(self, exc: BaseException) -> bool:
        """Return whether the error is of one of the rule's classes and the condition holds."""
        return isinstance(exc, tuple(self.classes())) and (
            self.applies is None or self.applies(exc)
        )

    def classes(self) -> Iterator[type[BaseException]]:
        """Yield the rule's classes, except classes that are not loaded."""
        module = sys.modules.get(self.module)
        for name in self.names.split():
            found = getattr(module, name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                yield found


def find(rules: tuple[ErrorRule, ...], exc: BaseException) -> Diagnosis | None:
    """Return the diagnosis of the first rule that fits, or ``None`` if it gives no diagnosis.

    Return ``None`` also if no rule fits.
    """
    for rule in rules:
        if rule.fits(exc):
            if isinstance(rule.means, Meaning):
                return Diagnosis(rule.means, rule.asked_seconds and rule.asked_seconds(exc))
            return None if rule.means is None else rule.means(exc)
    return None


@dataclass(frozen=True)
class LibraryErrors:
    """A classifier for the errors of one library. ``requests_errors()`` and others return it.

    Args:
        name: the library's name, for ``repr`` and logs.
        rules: the library's table of rules.
        idempotent: ``True`` = a second call does no harm, so the task is retried even if the first
            call may have been processed.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too.
        redirected: returns whether a server had answered with a redirect before the call failed.
            That server may have processed the call. ``None`` = do not look for redirects.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """

    name: str
    rules: tuple[ErrorRule, ...]
    idempotent: bool = False
    trust_503: bool = False
    redirected: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        for option in ("idempotent", "trust_503"):
            if not isinstance(value := getattr(self, option), bool):
                raise TypeError(f"invalid {option} {value!r}: expected True or False")

    def __call__(self, exc: BaseException) -> Verdict | None:
        diagnosis = find(self.rules, exc)
        if diagnosis is None:
            return None
        if self.redirected is not None and self.redirected(exc):
            diagnosis = Diagnosis(Meaning.IN_DOUBT, diagnosis.retry_after_seconds)
        return diagnosis.verdict(idempotent=self.idempotent, trust_503=self.trust_503)

    def __repr__(self) -> str:
        return f"{self.name}_errors(idempotent={self.idempotent})"
