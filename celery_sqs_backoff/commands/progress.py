"""A redrive under way: a bar on stderr for people, or events as JSON lines on stdout."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from celery_sqs_backoff.redrive.events import (
    Event,
    Failed,
    InDoubt,
    NotDeleted,
    Poison,
    Progress,
    RateChanged,
    Skipped,
    Started,
    as_dict,
)
from celery_sqs_backoff.redrive.pace import Pace
from celery_sqs_backoff.units import spell_duration

from .text import safe

__all__ = ["JsonEvents", "bar", "finished", "may_change_rate", "rate_keys"]

_IDS_SHOWN = 10

#: What one press of + or - multiplies or divides the rate by.
_RATE_STEP = 1.25

#: Below so many columns the counts are shown without a bar.
_BAR_COLUMNS = 70


class JsonEvents:
    """Prints each event as a line of JSON on stdout; remembers whether the last was the end."""

    def __init__(self) -> None:
        self.has_finished = False

    def __call__(self, event: Event) -> None:
        found = as_dict(event)
        self.has_finished = found["event"] == "Finished"
        click.echo(json.dumps(found, default=str))


@contextmanager
def bar(*, show_ids: bool = False) -> Iterator[Callable[[Event], None]]:
    """A progress bar on stderr, and a line for what a person should know; yields ``on_event``.

    Arguments:
        show_ids: name messages that are skipped or poison, too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns: list[ProgressColumn] = [TextColumn("{task.fields[facts]}", markup=False)]
    if console.width >= _BAR_COLUMNS:
        columns.append(BarColumn(bar_width=20))
    with Bar(*columns, console=console) as shown:
        task = shown.add_task("", total=None, facts="", visible=False)  # until it has begun

        def on_event(event: Event) -> None:
            if isinstance(event, Started):
                shown.update(task, total=event.messages, visible=True)
                if event.journal:
                    shown.console.print(f"journal: {event.journal}", markup=False)
            elif isinstance(event, Progress):
                done = event.sent + event.dropped
                shown.update(task, completed=done, total=event.to_send)
                shown.update(task, facts=_facts(event))
            elif line := _line(event, show_ids=show_ids):
                shown.console.print(line, markup=False, highlight=False)

        yield on_event


def may_change_rate() -> bool:
    """Whether ``+`` and ``-`` can be read: on a terminal, and in its foreground."""
    if sys.stdin is None or sys.stderr is None:  # closed by whoever has started us
        return False
    return sys.stdin.isatty() and sys.stderr.isatty() and _is_in_foreground(sys.stdin.fileno())


def _is_in_foreground(terminal: int) -> bool:
    """In the background, whoever reads from the terminal or sets it up is stopped."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not our session's terminal: it has no background
        return True


@contextmanager
def rate_keys(pace: Pace | None) -> Iterator[None]:
    """Let ``+`` and ``-`` on the terminal change the rate; ``None``: do nothing."""
    if pace is None:
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if not select.select([descriptor], [], [], 0.2)[0]:
                continue
            if not _is_in_foreground(descriptor):  # Ctrl-Z and bg: what is typed is the shell's
                over.wait(0.2)
                continue
            try:
                keys = os.read(descriptor, 64)
            except OSError:  # the terminal has hung up
                keys = b""
            if not keys:
                return
            faster, slower = keys.count(b"+"), keys.count(b"-")
            if faster or slower:
                rate = pace.change(_RATE_STEP ** (faster - slower))
                click.echo(f"rate: {rate:.3g}/s", err=True)

    click.echo("+ and - change the rate.", err=True)
    tty.setcbreak(descriptor)
    thread = threading.Thread(target=read, name="redrive-keys", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1)
        with suppress(termios.error):
            if _is_in_foreground(descriptor):
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _facts(event: Progress) -> str:
    """At most 50 columns, the counts first."""
    eta = "" if event.eta_seconds is None else f" {spell_duration(event.eta_seconds)} left"
    return (
        f"{event.sent + event.dropped}/{event.to_send} {event.rate:.1f}/s"
        f" failed {event.failed} back {event.returned}{eta}"
    )


def _line(event: Event, *, show_ids: bool) -> str | None:
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
        case Poison(ids, reason) if show_ids:
            return f"poison ({safe(reason)}): {safe(' '.join(ids), 100_000)}"
        case Skipped(ids, reason) if show_ids:
            return f"skipped ({safe(reason)}): {safe(' '.join(ids), 100_000)}"
    return None


def _ids(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    return safe(" ".join(ids[:_IDS_SHOWN]), 2_000) + more


def finished(ended: str, detail: str) -> dict[str, Any]:
    """The last event of a run that has no report."""
    return {"event": "Finished", "ended": ended, "detail": detail, "report": None}
