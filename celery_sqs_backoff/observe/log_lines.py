"""The log lines of a worker, as a table over its events.

Everything is in the text itself, because Celery's formatter drops ``extra``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from logging import ERROR, INFO, WARNING
from typing import Any, Final

from celery.utils.log import get_logger

from ..retry.outcomes import Outcome
from ..text import printable
from . import events as of
from .stream import Events

logger = get_logger(__name__)


@dataclass(frozen=True)
class LogLine:
    """A row of the table.

    Attributes:
        kind: of event. The line begins with its name.
        level: of the line.
        text: the event's fields have their names, and ``facts`` are those about its task.
        applies: whether this event has the line; ``None`` = each has it.
        once_per: fields; the line is written once for the same values of all of them.
    """

    kind: type[of.WorkerEvent]
    level: int
    text: str
    applies: Callable[[Any], bool] | None = None
    once_per: tuple[str, ...] = ()


LINES: Final = (
    LogLine(
        of.ReceiveFailed,
        WARNING,
        "queue %(queue)s: %(code)s; trying again until it works",
        lambda event: event.failures == 1,
    ),
    LogLine(of.ReceivingAgain, INFO, "queue %(queue)s, after %(failures)s failure(s)"),
    LogLine(of.Retried, INFO, "%(facts)s"),
    LogLine(of.DeadLettered, WARNING, "%(facts)s", lambda event: event.is_kept),
    LogLine(
        of.DeadLettered,
        WARNING,
        "%(facts)s: deleted, because no dead-letter queue takes it",
        lambda event: not event.is_kept,
    ),
    LogLine(of.LeaseLost, ERROR, "%(facts)s: another worker may be running it"),
    LogLine(
        of.RenewalRefused,
        WARNING,
        "message %(message_id)s of %(queue)s is no longer ours (%(code)s)",
    ),
    LogLine(
        of.HeldTooLong,
        ERROR,
        "message %(message_id)s of %(queue)s is held for longer than SQS allows",
    ),
    LogLine(
        of.SettlementFailed,
        WARNING,
        "cannot %(action)s message %(message_id)s on %(queue)s: %(code)s",
    ),
    LogLine(
        of.SettlementRefused,
        ERROR,
        "SQS refuses to %(action)s for queue %(queue)s (%(code)s); no message is lost, and this is"
        " logged once per queue",
        once_per=("queue", "action", "code"),
    ),
    LogLine(
        of.ProviderPaused,
        WARNING,
        "%(provider)s: its messages are hidden without running, except for probes",
    ),
    LogLine(of.ProviderProbed, INFO, "%(provider)s: one message runs"),
    LogLine(
        of.ProviderSlowed,
        WARNING,
        "%(provider)s: it refuses calls, which are limited, from one a second on",
    ),
    LogLine(
        of.ProviderRecovering,
        INFO,
        "%(provider)s: %(rate).1f calls a second, %(waiting)s messages wait",
    ),
    LogLine(
        of.ProviderRecovered,
        INFO,
        "%(provider)s: calls are not limited any more; %(recalled)s messages were brought forward",
    ),
)


def make_logged_events() -> Events:
    """Return a stream that is logged."""
    events = Events()
    events.subscribe(LogLines())
    return events


class LogLines:
    """Writes the lines: a listener of :class:`.stream.Events`."""

    def __init__(self) -> None:
        self._written: set[tuple[object, ...]] = set()
        self._lines: dict[type[of.WorkerEvent], list[LogLine]] = {}
        for line in LINES:
            self._lines.setdefault(line.kind, []).append(line)

    def __call__(self, event: of.WorkerEvent) -> None:
        """Write the event's lines, if it has any."""
        for line in self._lines.get(type(event), ()):
            if line.applies is None or line.applies(event):
                self._write(line, event)

    def _write(self, line: LogLine, event: of.WorkerEvent) -> None:
        if line.once_per:
            key = (line.kind, *(getattr(event, name) for name in line.once_per))
            if key in self._written:
                return
            self._written.add(key)
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        shown: dict[str, Any] = {
            name: value if isinstance(value, float) else printable(value)
            for name, value in values.items()
        }
        extra = {}
        if isinstance(event, of.OfTask):
            facts = _describe(values)
            shown["facts"] = " ".join(f"{name}={_quote(value)}" for name, value in facts.items())
            extra = {f"sqs_backoff.{name}": value for name, value in facts.items()}
        elif isinstance(event, of.OfProvider) and event.tenant:
            shown["provider"] += f"[{shown['tenant']}]"
        elif isinstance(event, of.SettlementFailed) and event.code is None:
            shown["code"] = "its visibility timeout is over"
        logger.log(line.level, f"sqs_backoff.{event.name}: {line.text}", shown, extra=extra)


def _describe(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event's task, in the order in which they are logged."""
    facts = {"task": values["task"], "id": values["task_id"], "queue": values["queue"]}
    facts |= {name: values.get(name) for name in ("attempt", "outcome", "reason", "error", "delay")}
    if facts["outcome"] is not None:
        facts["outcome"] = Outcome(facts["outcome"]).name
    if facts["delay"] is not None:
        facts["delay"] = int(facts["delay"])
    if "budget_left" in values:
        left = values["budget_left"]
        facts["budget_left"] = "unlimited" if left is None else left
    return {name: value for name, value in facts.items() if value is not None}


def _quote(value: object) -> str:
    text = printable(value)
    return f'"{text}"' if " " in text or not text else text
