"""Which dead letters are meant?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase

from .letter import Letter
from .units import parse_duration

__all__ = ["Selection"]


@dataclass(frozen=True, init=False)
class Selection:
    """All of these must hold; what is ``None`` (or empty) holds for every letter.

    Arguments:
        task: glob on the task's name.
        reason: glob on the reason of the dead-letter record.
        error: glob on ``"type: message"`` of the exception in the record.
        older, newer: seconds, timedelta or text such as ``"36h"``; the age of the message since it
            was first sent.
        ids: message ids and task ids, at least one.

    A glob does not match a letter that lacks what it is about.
    """

    task: str | None
    reason: str | None
    error: str | None
    older: float | None
    newer: float | None
    ids: frozenset[str] | None

    def __init__(
        self,
        *,
        task: str | None = None,
        reason: str | None = None,
        error: str | None = None,
        older: str | float | timedelta | None = None,
        newer: str | float | timedelta | None = None,
        ids: Iterable[str] | None = None,
    ) -> None:
        for name, value in (
            ("task", task),
            ("reason", reason),
            ("error", error),
            ("older", parse_duration(older, "older")),
            ("newer", parse_duration(newer, "newer")),
            ("ids", _ids(ids)),
        ):
            object.__setattr__(self, name, value)

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def matches(self, letter: Letter, now: float) -> bool:
        """Whether a letter is meant; ``now`` is seconds since the epoch."""
        if self.ids is not None and not self.ids & {letter.id, letter.task_id}:
            return False
        if self.older is not None or self.newer is not None:
            if letter.sent_at is None:
                return False
            age = now - letter.sent_at
            if self.older is not None and age <= self.older:
                return False
            if self.newer is not None and age >= self.newer:
                return False
        return (
            _matches(self.task, letter.task)
            and _matches(self.reason, letter.reason)
            and _matches(self.error, letter.error)
        )


def _ids(ids: Iterable[str] | None) -> frozenset[str] | None:
    if ids is None:
        return None
    if isinstance(ids, str):
        raise TypeError(f"ids={ids!r} is not legal: it must be a list of ids, not a text")
    found = frozenset(ids)
    if not found:  # of a search that found nothing; all letters is the last that is meant
        raise ValueError("ids: there is no id in it; for all messages leave it out")
    return found


def _matches(glob: str | None, text: str | None) -> bool:
    return glob is None or (text is not None and fnmatchcase(text, glob))
