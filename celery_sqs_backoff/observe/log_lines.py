"""Write the log lines of a worker, one for each event whose class defines a ``line``.

All facts are in the text of a line, because Celery's formatter drops ``extra``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from celery.utils.log import get_logger

from ..retry.outcomes import Outcome
from ..text import printable
from . import events as of

logger = get_logger(__name__)


class LogLines:
    """A listener of :class:`.events.Events` that writes log lines."""

    def __init__(self) -> None:
        self._refused: set[of.WorkerEvent] = set()

    def __call__(self, event: of.WorkerEvent) -> None:
        """Write the event's line, if it has one.

        If SQS refuses an action again and again, only the first refusal has a line. If receives
        fail several times in a row, only the first failure has a line.
        """
        if event.line is None or event in self._refused:
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
                    shown["facts"] += ": deleted (no dead-letter queue, or on_give_up is 'fail')"
        level, text = event.line
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
