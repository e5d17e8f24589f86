"""``celery sqs-peek``: what is in a dead-letter queue?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_sqs_backoff.redrive import RedriveRefused, RedriveUnreachable, peek
from celery_sqs_backoff.redrive.plan import DEFAULT_SAMPLE

from .exit_codes import UNREACHABLE, USAGE
from .options import ids_of, option, selection_options
from .show import LOOKED, plan_as_dict, print_letters, print_plan

__all__ = ["sqs_peek"]

_EPILOG = """\b
Examples:
  celery -A proj sqs-peek mail-dlq
  celery -A proj sqs-peek mail-dlq --task 'mails.*' --letters
  celery -A proj sqs-peek mail-dlq --json | jq .by_reason
"""


@click.command("sqs-peek", cls=CeleryCommand, epilog=_EPILOG)
@click.argument("queue")
@selection_options
@option(
    "Output",
    "--sample",
    type=click.IntRange(1),
    default=DEFAULT_SAMPLE,
    show_default=True,
    help="Look at so many messages at the most.",
)
@option("Output", "--letters", is_flag=True, help="List the letters, one per line.")
@option(
    "Output",
    "--arguments",
    is_flag=True,
    help="With each letter its task's arguments, if they are JSON. They are your users' data.",
)
@option("Output", "--bodies", is_flag=True, help="With each letter its body, as it is.")
@option("Output", "--rate", metavar="RATE", help="Say how long a redrive at this rate takes: 10/s.")
@option(
    "Output",
    "--force",
    is_flag=True,
    help="Also if the dead-letter queue has one itself, to which SQS may move what we look at.",
)
@option("Output", "--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_peek(
    ctx: click.Context,
    queue: str,
    id: tuple[str, ...],  # noqa: A002  # the option's name
    ids: Path | None,
    letters: bool,
    arguments: bool,
    bodies: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what is in a dead-letter queue: how many messages, by task, reason and age.

    QUEUE: the dead-letter queue, or a queue that has one; a name, URL or ARN.

    The messages are given back, but looking is not free: each one looked at counts a receive.
    """
    try:
        plan = peek(ctx.obj.app, queue, raw=arguments or bodies, ids=ids_of(id, ids), **options)
    except (ValueError, RedriveRefused) as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(USAGE)
    except RedriveUnreachable as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(UNREACHABLE)
    click.echo(LOOKED, err=True)
    if as_json:
        shown = plan_as_dict(plan, show_arguments=arguments, show_bodies=bodies)
        click.echo(json.dumps(shown, default=str))
        return
    print_plan(plan, err=False)
    if letters or arguments or bodies:
        print_letters(plan, show_arguments=arguments, show_bodies=bodies)
