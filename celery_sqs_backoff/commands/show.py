"""A plan, a redrive under way and its report, for people: tables and a bar on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from celery_sqs_backoff.envelope import arguments
from celery_sqs_backoff.redrive import Plan, RedriveReport
from celery_sqs_backoff.redrive.events import (
    CanaryPassed,
    CanarySent,
    Event,
    Failed,
    InDoubt,
    NotDeleted,
    Progress,
    RateChanged,
    Started,
    as_dict,
)
from celery_sqs_backoff.redrive.plan import spell_expiry
from celery_sqs_backoff.redrive.units import spell_duration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "LOOKED",
    "JsonEvents",
    "bar",
    "plan_as_dict",
    "print_letters",
    "print_plan",
    "print_report",
]

_IDS_SHOWN = 10

#: Behind each look, on stderr.
LOOKED = "Each message looked at was received once more, which SQS counts, and given back."


def print_plan(plan: Plan, *, err: bool) -> None:
    """What was found; ``err``: on stderr, because stdout is for results."""
    from rich.table import Table

    console = _console(err=err)
    console.print(f"[bold]{plan.source}[/]: {plan.messages} messages, {plan.looked_at} looked at")
    if plan.matching != plan.looked_at:
        console.print(f"{plan.matching} of them match")
    for title, histogram in (
        ("by task", plan.by_task),
        ("by reason", plan.by_reason),
        ("by age", plan.by_age),
        ("goes to", plan.by_destination),
    ):
        if not histogram:
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(justify="right", style="cyan")
        table.add_column(overflow="fold")
        for name, count in histogram.items():
            table.add_row(str(count), _plain(name))
        console.print(f"[bold]{title}[/]")
        console.print(table)
    if plan.expired:
        console.print(f"{plan.expired} have expired: a worker would throw them away (--expired)")
    if plan.replayed_out:
        console.print(f"{plan.replayed_out} were replayed too often (--max-replays)")
    if expiry := spell_expiry(plan):
        console.print(expiry)
    if plan.duration_seconds is not None:
        console.print(f"takes about {spell_duration(plan.duration_seconds)} at this rate")


def print_letters(plan: Plan, *, show_arguments: bool, show_bodies: bool) -> None:
    """One line per letter, on stdout; its arguments and its body if asked for."""
    raw = {letter.id: letter for letter in plan.raw}
    for fact in plan.letters:
        age = "?" if fact.age_seconds is None else spell_duration(fact.age_seconds)
        marks = " expired" if fact.expired else ""
        marks += f" replayed {fact.replays}x" if fact.replays else ""
        line = (
            f"{fact.id}  {fact.task or '-'}  {fact.task_id or '-'}  {age}"
            f"  {fact.reason or '-'}  {fact.error or '-'}{marks}"
        )
        click.echo(_on_one_line(line))
        if show_arguments:
            click.echo(f"  {_arguments(raw[fact.id].body, fact.content_type)}")
        if show_bodies:
            click.echo(f"  {raw[fact.id].body}")


def plan_as_dict(plan: Plan, *, show_arguments: bool, show_bodies: bool) -> dict[str, Any]:
    """A plan as JSON takes it."""
    raw = {letter.id: letter for letter in plan.raw}
    letters = []
    for fact in plan.letters:
        shown = asdict(fact)
        if show_arguments:
            shown["arguments"] = arguments(raw[fact.id].body)
        if show_bodies:
            shown["body"] = raw[fact.id].body
        letters.append(shown)
    facts = {name: value for name, value in vars(plan).items() if name not in ("raw", "letters")}
    return {"event": "Plan", **facts, "letters": letters}


def print_report(report: RedriveReport) -> None:
    """The counts, on stdout."""
    fields = asdict(report)
    ended, detail = report.ended.value, fields.pop("detail")
    del fields["ended"]
    click.echo(f"{ended}{f': {detail}' if detail else ''}")
    click.echo("  ".join(f"{name} {value}" for name, value in fields.items()))


class JsonEvents:
    """Prints each event as a line of JSON on stdout."""

    def __call__(self, event: Event) -> None:
        click.echo(json.dumps(as_dict(event), default=str))


@contextmanager
def bar() -> Iterator[Any]:
    """A progress bar on stderr, and a line for what a person should know; yields ``on_event``."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = _console(err=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Bar(*columns, console=console) as shown:
        task = shown.add_task("", total=None, facts="", visible=False)  # until it has begun

        def on_event(event: Event) -> None:
            if isinstance(event, Started):
                shown.update(task, total=event.messages, description=event.source, visible=True)
            elif isinstance(event, Progress):
                shown.update(task, completed=event.looked_at, total=event.messages)
                shown.update(task, facts=_facts(event))
            elif line := _line(event):
                shown.console.print(line, markup=False, highlight=False)

        yield on_event


def _facts(event: Progress) -> str:
    eta = "" if event.eta_seconds is None else f", {spell_duration(event.eta_seconds)} left"
    return (
        f"{event.rate:.1f}/s{eta}  sent {event.sent}  failed {event.failed}"
        f"  returned {event.returned}  poison {event.poison}"
    )


def _line(event: Event) -> str | None:
    match event:
        case InDoubt(ids, resend):
            done = "sent again" if resend else "held"
            return f"in doubt, {done}: {_ids(ids)}"
        case Failed(ids, reason):
            return f"failed ({reason}): {_ids(ids)}"
        case NotDeleted(ids, reason):
            return f"sent, but not deleted ({reason}): {' '.join(ids)}"
        case RateChanged(factor, reason):
            return f"slowed down to {factor:.0%} of the rate: {reason}"
        case CanarySent(messages):
            return f"canary of {messages} sent; waiting for it to leave the main queue"
        case CanaryPassed(messages):
            return f"canary of {messages} has passed"
    return None


def _ids(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    return " ".join(ids[:_IDS_SHOWN]) + more


def _arguments(body: str, content_type: str | None) -> str:
    found = arguments(body)
    if found is None:
        return f"({content_type or 'no Celery message'}: not decoded)"
    return json.dumps(found)


def _console(*, err: bool) -> Console:
    from rich.console import Console

    return Console(stderr=err, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(_on_one_line(text))


def _on_one_line(text: str) -> str:
    """Spell out line ends, and what a terminal would obey: it comes from outside."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
