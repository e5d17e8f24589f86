"""``celery sqs-safe``: show guards, locks, steps and workflows, and delete their records."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.safe.document import CLOSING
from celery_sqs_backoff.safe.inspect import Entry, free, kept_steps, look
from celery_sqs_backoff.store.errors import SafeError
from celery_sqs_backoff.text import printable

from .command import CommandFailed, app_of, command
from .environment import open_records
from .exit_codes import DONE, FOUND, UNREACHABLE, USAGE
from .options import option
from .text import counted

_KINDS = ("guard", "lock", "workflow", "step")

_CLOSING = (
    "is closing: the task celery_sqs_backoff.take_back is undoing its steps. Wait until that task"
    " has ended. (If it is a dead letter, redrive it.)"
)


@command(
    "sqs-safe",
    codes={
        DONE: "shown or freed",
        FOUND: "there is no such record, or it has changed",
        UNREACHABLE: "the store does not answer",
    },
    examples="""
        celery -A proj sqs-safe list order:7
        celery -A proj sqs-safe show order:7 --show-results
        celery -A proj sqs-safe list task:shop.tasks.pay:0b1c...
        celery -A proj sqs-safe free order:7 --kind lock
        celery -A proj sqs-safe free order:7 --kind step --name release
    """,
)
@click.argument("action", type=click.Choice(["list", "show", "free"]))
@click.argument("scope")
@option("Which records", "--kind", type=click.Choice(_KINDS), help="Only records of this kind.")
@option("Which records", "--name NAME", help="Only the step of this name.")
@option("Output", "--json", "as_json", help="One JSON object per line.")
@option("Output", "--show-results", help="Show results, which are your data.")
@option("Freeing", "--yes", help="Do not ask.")
def sqs_safe(
    ctx: click.Context,
    action: str,
    scope: str,
    kind: str | None,
    name: str | None,
    as_json: bool,
    show_results: bool,
    yes: bool,
) -> None:
    """Show and free the guards, locks, workflows and steps of SCOPE.

    SCOPE is the key of a guard or lock, or the scope of steps or of a workflow, such as order:7.
    For the records of one message, it is task:NAME:ID. "list" names the records, "show" adds their
    content, and "free" deletes records. "free" needs --kind.

    After "free", another run can take the lock, and another message can pass the guard. A freed
    step is done again. A freed workflow does all its steps again. But if its steps were undone, the
    steps that have no undo stay done. You cannot undo "free".
    """
    if action == "free" and kind is None:
        raise click.UsageError("free: name the kind of records with --kind")
    app = app_of(ctx)
    try:
        records = open_records(app)
        found = [
            entry
            for entry in look(records, scope)
            if kind in (None, entry.kind) and name in (None, entry.name)
        ]
        if not found:
            click.echo("no such record", err=True)
            sys.exit(FOUND)
        for entry in found:
            _print(entry, as_json=as_json, details=action == "show", show_results=show_results)
        if action == "free":
            for name in (name for entry in found for name in kept_steps(entry)):
                click.echo(
                    f"kept, because it has no undo and was not undone: {printable(name)}", err=True
                )
            for entry in found:
                if entry.state == CLOSING:
                    click.echo(f"{printable(entry.name)} {_CLOSING}", err=True)
            if not yes:
                click.confirm(f"Free {counted(len(found), 'record')}?", abort=True, err=True)
            freed = [free(records, entry) for entry in found]
            click.echo(f"{sum(freed)} freed", err=True)
            if not all(freed):
                click.echo("the other records have changed, or belong to another app", err=True)
                sys.exit(FOUND)
    except ImproperlyConfigured as exc:
        raise CommandFailed(exc, USAGE) from exc
    except SafeError as exc:
        raise CommandFailed(f"the store does not answer: {exc}", UNREACHABLE) from exc


def _print(entry: Entry, *, as_json: bool, details: bool, show_results: bool) -> None:
    shown: dict[str, Any] = {"kind": entry.kind, "name": entry.name, "state": entry.state}
    if details and entry.result is not None:
        shown["result"] = json.loads(entry.result) if show_results else "(hidden)"
    if as_json:
        click.echo(json.dumps(shown))
        return
    line = f"{entry.kind:9} {entry.state:12} {printable(entry.name)}"
    if "result" in shown:
        result = shown["result"]
        line += f"  {printable(json.dumps(result) if show_results else result, 500)}"
    click.echo(line)
