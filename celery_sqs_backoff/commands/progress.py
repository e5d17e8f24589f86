"""Show the progress of a redrive on stderr, in one line for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

from celery_sqs_backoff.redrive import events
from celery_sqs_backoff.units import spell_duration

from .text import counted, safe

_IDS_SHOWN = 10


@contextmanager
def show_progress() -> Iterator[Callable[[events.RedriveEvent], None]]:
    """Yield an ``on_event`` that prints notices, and the progress if stderr is a terminal."""
    progress = ""

    def draw(text: str) -> None:
        if columns := _columns():
            click.echo(f"\r{text[:columns]:{columns}}\r", nl=False, err=True)

    def on_event(event: events.RedriveEvent) -> None:
        nonlocal progress
        if isinstance(event, events.Progress):
            progress = _facts(event)
            draw(progress)
        elif line := _line(event):
            draw("")
            click.echo(line, err=True)
            draw(progress)

    try:
        yield on_event
    finally:
        with suppress(OSError):  # the terminal may be closed
            if progress and _columns():
                draw(progress)
                click.echo(err=True)


def _columns() -> int:
    """Return how many characters fit on a line of stderr, or 0 if stderr is no terminal."""
    try:
        return max(0, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError, AttributeError):
        return 0


def _facts(event: events.Progress) -> str:
    left = "" if event.eta_seconds is None else f" {spell_duration(event.eta_seconds)} left"
    return (
        f"{event.sent + event.dropped}/{event.to_send} {event.rate:.1f}/s"
        f" failed {event.failed} came back {event.returned}{left}"
    )


def _line(event: events.RedriveEvent) -> str | None:
    match event:
        case events.Started(journal=str(journal)):
            return f"journal: {journal}"
        case events.InDoubt(ids, resend):
            late = "another run may have sent them, too"
            done = late if resend is None else "sent again" if resend else "not sent again"
            return f"in doubt, {done}: {safe(' '.join(ids), 100_000)}"
        case events.Failed(ids, reason):
            return f"failed ({safe(reason)}): {_ids(ids)}"
        case events.NotDeleted(ids, reason):
            return f"sent, but not deleted ({safe(reason)}): {safe(' '.join(ids), 100_000)}"
        case events.RunWaits(messages, seconds):
            hidden = counted(messages, "hidden message")
            return f"waiting for {hidden}, for up to {spell_duration(seconds)}"
    return None


def _ids(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    return safe(" ".join(ids[:_IDS_SHOWN]), 2_000) + more
