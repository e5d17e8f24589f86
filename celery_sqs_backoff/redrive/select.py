"""Which dead letters are selected?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase

from ..units import parse_duration
from .message import DeadLetter

__all__ = ["OUTCOMES", "Selection"]

OUTCOMES = ("RETRYABLE", "NOT_PROCESSED", "UNKNOWN")


@dataclass(frozen=True, init=False)
class Selection:
    """All of these must hold; what is ``None`` (or empty) holds for every message.

    Arguments:
        task: glob on the task's name.
        reason: glob on the reason of the dead-letter record.
        outcome: ``"RETRYABLE"``, ``"NOT_PROCESSED"`` or ``"UNKNOWN"``, by the record.
        origin: name (in SQS) or ARN of the queue that the message came from.
        error: glob on ``"type: message"`` of the exception in the record.
        older, newer: seconds, timedelta or text such as ``"36h"``; the age of the message since it
            was first sent.
        ids: message ids and task ids, at least one.

    A glob does not match a message that lacks what it is about.
    """

    task: str | None
    reason: str | None
    outcome: str | None
    origin: str | None
    error: str | None
    older: float | None
    newer: float | None
    ids: frozenset[str] | None

    def __init__(
        self,
        *,
        task: str | None = None,
        reason: str | None = None,
        outcome: str | None = None,
        origin: str | None = None,
        error: str | None = None,
        older: str | float | timedelta | None = None,
        newer: str | float | timedelta | None = None,
        ids: Iterable[str] | None = None,
    ) -> None:
        for name, value in (
            ("task", task),
            ("reason", reason),
            ("outcome", _outcome(outcome)),
            ("origin", origin),
            ("error", error),
            ("older", parse_duration(older, "older")),
            ("newer", parse_duration(newer, "newer")),
            ("ids", _ids(ids)),
        ):
            if value == "":  # of a variable that is not set: it would match nothing
                raise ValueError(f"invalid {name} '': for all messages leave it out")
            object.__setattr__(self, name, value)

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def matches(self, message: DeadLetter, now: float) -> bool:
        """Whether a message is selected; ``now`` is seconds since the epoch."""
        if self.ids is not None and not self.ids & {message.id, message.task_id}:
            return False
        if self.older is not None or self.newer is not None:
            if (first_sent_at := message.first_sent_at) is None:
                return False
            age = now - first_sent_at
            if self.older is not None and age <= self.older:
                return False
            if self.newer is not None and age >= self.newer:
                return False
        if self.outcome is not None and message.outcome != self.outcome:
            return False
        if self.origin is not None and self.origin not in (
            message.origin,
            _queue_name(message.origin),
        ):
            return False
        return (
            _matches(self.task, message.task)
            and _matches(self.reason, message.reason)
            and _matches(self.error, message.error)
        )


def _outcome(value: str | None) -> str | None:
    if value is None:
        return None
    found = value.upper().replace(" ", "_").replace("-", "_")
    if found not in OUTCOMES:
        raise ValueError(f"invalid outcome {value!r}: expected one of {', '.join(OUTCOMES)}")
    return found


def _queue_name(origin: str | None) -> str | None:
    return None if origin is None else origin.rpartition("/" if "://" in origin else ":")[2]


def _ids(ids: Iterable[str] | None) -> frozenset[str] | None:
    if ids is None:
        return None
    if isinstance(ids, str):
        raise TypeError(f"invalid ids {ids!r}: expected a list of ids, not a text")
    found = frozenset(ids) - {""}
    if not found:  # of a search that found nothing; it never means all messages
        raise ValueError("invalid ids: expected at least one; for all messages leave it out")
    return found


def _matches(glob: str | None, text: str | None) -> bool:
    return glob is None or (text is not None and fnmatchcase(text, glob))
