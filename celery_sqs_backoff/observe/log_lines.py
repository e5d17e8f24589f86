"""Write the log lines of a worker: one line for each event of a kind in ``LINES``.

All facts are in the text of a line, because Celery's formatter drops ``extra``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from logging import ERROR, INFO, WARNING
from typing import Any, Final

from celery.utils.log import get_logger

from ..retry.outcomes import Outcome
from ..text import printable
from . import events as of

logger = get_logger(__name__)


#: Level and text of the log line for each kind of event. The line begins with the event's name. A
#: text may use the event's fields by their names, and ``facts``, the facts about its task.
LINES: Final[Mapping[type[of.WorkerEvent], tuple[int, str]]] = {
    of.ReceiveFailed: (WARNING, "queue %(queue)s: %(code)s; trying again until it works"),
    of.ReceivingAgain: (INFO, "queue %(queue)s, after %(failures)s failure(s)"),
    of.Retried: (INFO, "%(facts)s"),
    of.DeadLettered: (WARNING, "%(facts)s"),
    of.LeaseLost: (ERROR, "%(facts)s: another worker may be running it"),
    of.RenewalRefused: (
        WARNING,
        "this worker no longer holds message %(message_id)s of %(queue)s (%(code)s)",
    ),
    of.HeldTooLong: (
        ERROR,
        "message %(message_id)s of %(queue)s is held for longer than SQS allows",
    ),
    of.SettlementFailed: (
        WARNING,
        "cannot %(action)s message %(message_id)s on %(queue)s: %(code)s",
    ),
    of.SettlementRefused: (
        ERROR,
        "SQS refuses to %(action)s for queue %(queue)s (%(code)s); no message is lost, and this is"
        " logged once per queue",
    ),
    of.ProviderPaused: (
        WARNING,
        "%(provider)s: its messages are hidden without running, except for probes",
    ),
    of.ProviderProbed: (INFO, "%(provider)s: one message runs as a probe"),
    of.ProviderSlowed: (
        WARNING,
        "%(provider)s: it fails or refuses calls; the worker limits them, from one a second up",
    ),
    of.ProviderRecovering: (
        INFO,
        "%(provider)s: %(rate).1f calls a second, %(waiting)s messages wait",
    ),
    of.ProviderRecovered: (
        INFO,
        "%(provider)s: calls are not limited any more; %(recalled)s messages were brought forward",
    ),
}


def make_logged_events() -> of.Events:
    """Return an event stream that has the log lines as its first listener."""
    events = of.Events()
    events.subscribe(LogLines())
    return events


class LogLines:
    """A listener of :class:`.events.Events` that writes log lines."""

    def __init__(self) -> None:
        self._refused: set[of.WorkerEvent] = set()

    def __call__(self, event: of.WorkerEvent) -> None:
        """Write the event's line, if it has one.

        If SQS refuses an action again and again, only the first event has a line. The same holds
        for receives that fail several times in a row.
        """
        level, text = LINES.get(type(event), (0, ""))
        if not level or event in self._refused:
            return
        shown: dict[str, Any] = {}
        for field in fields(event):
            value = getattr(event, field.name)
            shown[field.name] = value if isinstance(value, float) else printable(value)
        extra: dict[str, Any] = {}
        match event:
            case of.ReceiveFailed() if event.failures > 1:
                return
            case of.SettlementRefused():
                self._refused.add(event)
            case of.SettlementFailed(code=None):
                shown["code"] = "its visibility timeout is over"
            case of.OfProvider() if event.tenant:
                shown["provider"] += f"[{shown['tenant']}]"
            case of.OfTask():
                facts = _list_facts(event)
                shown["facts"] = " ".join(f"{name}={_quote(value)}" for name, value in facts)
                extra = {f"sqs_backoff.{name}": value for name, value in facts}
                if isinstance(event, of.DeadLettered) and not event.is_kept:
                    shown["facts"] += ": deleted, because no dead-letter queue takes it"
        logger.log(level, f"sqs_backoff.{event.name}: {text}", shown, extra=extra)


def _list_facts(event: of.OfTask) -> list[tuple[str, Any]]:
    """Return name and value of each fact about an event's task, in the order of the log line."""
    facts: list[tuple[str, Any]] = [("task", event.task), ("id", event.task_id)]
    for name in ("queue", "attempt", "outcome", "reason", "error", "delay"):
        value = getattr(event, name, None)
        if value is not None:
            value = Outcome(value).name if name == "outcome" else value
            facts.append((name, int(value) if name == "delay" else value))
    if isinstance(event, of.Retried):
        left = event.budget_left
        facts.append(("budget_left", "unlimited" if left is None else left))
    return facts


def _quote(value: object) -> str:
    text = printable(value)
    return f'"{text}"' if " " in text or not text else text
