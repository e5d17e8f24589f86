"""A redrive under way: a bar on stderr for people, or events as JSON lines on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from celery_sqs_backoff.redrive.events import (
    Failed,
    InDoubt,
    NotDeleted,
    Progress,
    RateChanged,
    RedriveEvent,
    Started,
    as_dict,
)
from celery_sqs_backoff.units import spell_duration

from .text import safe

_IDS_SHOWN = 10

#: Below so many columns the counts are shown without a bar.
_BAR_COLUMNS = 70


class JsonEvents:
    """Prints each event as a line of JSON on stdout; remembers whether the last was the end."""

    def __init__(self) -> None:
        self.has_finished = False

    def __call__(self, event: RedriveEvent) -> None:
        found = as_dict(event)
        self.has_finished = found["event"] == "Finished"
        click.echo(json.dumps(found, default=str))


@contextmanager
def bar() -> Iterator[Callable[[RedriveEvent], None]]:
    """Show a progress bar on a terminal, and lines for what a person should know, on stderr.

    Yields ``on_event``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns: list[ProgressColumn] = [TextColumn("{task.fields[facts]}", markup=False)]
    if console.width >= _BAR_COLUMNS:
        columns.append(BarColumn(bar_width=20))
    with Bar(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None, facts="", visible=False)  # until it has begun

        def on_event(event: RedriveEvent) -> None:
            if isinstance(event, Started):
                shown.update(task, total=event.messages, visible=True)
                if event.journal:
                    shown.console.print(f"journal: {event.journal}", markup=False)
            elif isinstance(event, Progress):
                done = event.sent + event.dropped
                shown.update(task, completed=done, total=event.to_send)
                shown.update(task, facts=_facts(event))
            elif line := _line(event):
                shown.console.print(line, markup=False, highlight=False)

        yield on_event


def _facts(event: Progress) -> str:
    """At most 50 columns, the counts first."""
    eta = "" if event.eta_seconds is None else f" {spell_duration(event.eta_seconds)} left"
    return (
        f"{event.sent + event.dropped}/{event.to_send} {event.rate:.1f}/s"
        f" failed {event.failed} back {event.returned}{eta}"
    )


def _line(event: RedriveEvent) -> str | None:
    match event:
        case InDoubt(ids, resend):
            late = "another run may have sent them, too"
            done = late if resend is None else "sent again" if resend else "held"
            return f"in doubt, {done}: {safe(' '.join(ids), 100_000)}"
        case Failed(ids, reason):
            return f"failed ({safe(reason)}): {_ids(ids)}"
        case NotDeleted(ids, reason):
            return f"sent, but not deleted ({safe(reason)}): {safe(' '.join(ids), 100_000)}"
        case RateChanged(factor, reason):
            return f"slowed down to {factor:.0%} of the rate: {safe(reason)}"
    return None


def _ids(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    return safe(" ".join(ids[:_IDS_SHOWN]), 2_000) + more


def finished(ended: str, detail: str) -> dict[str, Any]:
    """The last event of a run that has no report."""
    return {"event": "Finished", "ended": ended, "detail": detail, "report": None}
