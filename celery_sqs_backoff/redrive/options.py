"""Check the options of a redrive, and select messages by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..sqs.limits import MAX_DELAY_SECONDS
from ..sqs.queues import queue_name
from ..units import parse_duration, parse_rate
from .message import DlqMessage
from .probe import Probe, parse_probe

OUTCOMES = ("RETRYABLE", "NOT_PROCESSED", "UNKNOWN")

#: The options that select messages.
SELECTION = ("task", "reason", "outcome", "origin", "error", "older", "newer", "ids")


@dataclass(frozen=True, kw_only=True)
class RedriveOptions:
    """The options of :func:`celery_sqs_backoff.redrive`, which documents them.

    The annotated types are the types after the check. Rates, durations, probes and paths may also
    be given as text.

    Arguments:
        task: glob that the task's name must match, such as ``"mails.*"``.
        reason: glob that the reason in the dead-letter record must match.
        outcome: the outcome in the dead-letter record: ``"RETRYABLE"``, ``"NOT_PROCESSED"`` or
            ``"UNKNOWN"``.
        origin: name (in SQS), URL or ARN of the queue that the message came from. Only the queue's
            name is compared.
        error: glob that the exception in the record must match, as ``"type: message"``.
        older: only messages first sent longer ago than this: seconds, timedelta or text such as
            ``"36h"``.
        newer: only messages first sent within this time before now, in the same forms.
        ids: message IDs and task IDs, at least one.

    A message must match each of these options that is given. ``None`` matches every message. A glob
    does not match a message that lacks the text, such as a message without a record.

    Raises:
        ValueError, TypeError: an option is invalid.
    """

    task: str | None = None
    reason: str | None = None
    outcome: str | None = None
    origin: str | None = None
    error: str | None = None
    older: float | None = None
    newer: float | None = None
    ids: frozenset[str] | None = None
    rate: float | None = None
    ramp: float | None = None
    spread: float | None = None
    limit: int | None = None
    max_replays: int = 3
    probe: Probe | None = None
    expired: str = "leave"
    include_unknown: bool = False
    delete: bool = False
    dump: Path | None = None
    restore: Path | None = None
    journal: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(getattr(self, name)))
        for name in SELECTION:
            # An empty text is often an unset shell variable. It would match no message.
            if getattr(self, name) == "":
                raise ValueError(f"invalid {name} '': to select all messages, omit it")
        for name in ("limit", "max_replays"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"invalid {name} {value!r}: expected a whole number from 1")
        if self.expired not in ("leave", "extend"):
            raise ValueError(f"invalid expired {self.expired!r}: expected one of leave, extend")
        if self.ramp and self.rate is None:
            raise ValueError("ramp needs a rate: it raises the rate from a tenth to the full rate")
        if self.spread and self.spread > MAX_DELAY_SECONDS:
            raise ValueError(
                f"invalid spread {self.spread:g}: expected at most {MAX_DELAY_SECONDS} s,"
                " SQS's longest delay"
            )
        if self.delete and self.dump is None:
            raise ValueError("delete needs an archive (dump): there is no undo")
        for name in (*SELECTION, "limit", "rate", "spread", "probe", "delete", "dump"):
            if self.restore is not None and getattr(self, name):
                raise ValueError(
                    f"restore cannot be used with {name}: it puts back all messages of the archive"
                )

    def matches(self, message: DlqMessage, now: float) -> bool:
        """Return whether a message is selected. ``now``: seconds since the epoch."""
        sent_at, origin = message.first_sent_at, message.origin
        age = None if sent_at is None else now - sent_at
        return (
            (self.ids is None or bool(self.ids & {message.id, message.task_id}))
            and (self.older is None or (age is not None and age > self.older))
            and (self.newer is None or (age is not None and age < self.newer))
            and (self.outcome is None or message.outcome == self.outcome)
            and (self.origin is None or queue_name(self.origin) == queue_name(origin or ""))
            and _matches(self.task, message.task)
            and _matches(self.reason, message.reason)
            and _matches(self.error, message.error)
        )


def has_selection(options: Mapping[str, Any]) -> bool:
    """Return whether options of a redrive, by name, select only some of the messages."""
    return any(options.get(name) is not None for name in SELECTION)


def _parse_outcome(value: str | None) -> str | None:
    if value is None:
        return None
    found = value.upper().replace(" ", "_").replace("-", "_")
    if found and found not in OUTCOMES:
        raise ValueError(f"invalid outcome {value!r}: expected one of {', '.join(OUTCOMES)}")
    return found


def _parse_ids(ids: Iterable[str] | None) -> frozenset[str] | None:
    if ids is None:
        return None
    if isinstance(ids, str):
        raise TypeError(f"invalid ids {ids!r}: expected a list of ids, not a text")
    found = frozenset(ids) - {""}
    if not found:  # often the result of an empty search, which must not select all messages
        raise ValueError("invalid ids: expected at least one; to select all messages, omit it")
    return found


def _matches(glob: str | None, text: str | None) -> bool:
    return glob is None or (text is not None and fnmatchcase(text, glob))


def _make_duration_parser(name: str) -> Callable[[str | float | timedelta | None], float | None]:
    return lambda value: parse_duration(value, name)


def _parse_path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


_PARSERS: dict[str, Callable[[Any], object]] = {
    "outcome": _parse_outcome,
    "ids": _parse_ids,
    "rate": parse_rate,
    "probe": parse_probe,
    **{name: _make_duration_parser(name) for name in ("older", "newer", "ramp", "spread")},
    **dict.fromkeys(("dump", "restore", "journal"), _parse_path),
}
