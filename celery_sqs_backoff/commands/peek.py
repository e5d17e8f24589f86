"""``celery sqs-peek``: what is in a dead-letter queue?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from celery.bin.base import handle_preload_options
from click.core import ParameterSource

from celery_sqs_backoff.redrive import RedriveRefused, RedriveUnreachable, peek
from celery_sqs_backoff.redrive.look import DEFAULT_SAMPLE

from .command import Command
from .environment import until_signalled
from .exit_codes import INTERRUPTED, NOTHING_MATCHED, UNREACHABLE, USAGE
from .options import has_selection, ids_of, option, selection_options
from .progress import finished
from .show import looked, no_match, plan_as_dict, print_messages, print_plan, print_whole
from .text import safe

_EPILOG = """\b
Examples:
  celery -A proj sqs-peek mail-dlq
  celery -A proj sqs-peek mail-dlq --task 'mails.*' --messages
  celery -A proj sqs-peek mail-dlq --id 4f2c...
  celery -A proj sqs-peek mail-dlq --json | jq .by_reason
"""


@click.command("sqs-peek", cls=Command, epilog=_EPILOG)
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
@option("Output", "--messages", is_flag=True, help="List the messages, one per line.")
@option(
    "Output",
    "--arguments",
    is_flag=True,
    help="With each message its task's arguments, if they are JSON. They are your users' data.",
)
@option("Output", "--bodies", is_flag=True, help="With each message its body, as it is.")
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
    messages: bool,
    arguments: bool,
    bodies: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what is in a dead-letter queue: how many messages, by task, outcome, reason and age.

    QUEUE: the dead-letter queue, or a queue that has one; a name, URL or ARN.

    With --id: one message whole, traceback included (all messages are looked at for it).

    The messages are given back, but looking is not free: each one looked at counts a receive.
    """
    if id and ctx.get_parameter_source("sample") is ParameterSource.DEFAULT:
        options["sample"] = None
    raw = arguments or bodies or bool(id)
    try:
        options["ids"] = ids_of(id, ids)
        with until_signalled() as stop:
            plan = peek(ctx.obj.app, queue, raw=raw, stop=stop, **options)
        if stop.is_set():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        _fail("interrupted", "What was looked at is shown again.", INTERRUPTED, as_json=as_json)
    except (ValueError, TypeError, RedriveRefused) as exc:
        _fail("refused", exc, USAGE, as_json=as_json)
    except RedriveUnreachable as exc:
        _fail("unreachable", exc, UNREACHABLE, as_json=as_json)
    click.echo(looked(plan), err=True)
    if as_json:
        shown = plan_as_dict(plan, show_arguments=arguments, show_bodies=bodies)
        click.echo(json.dumps(shown, default=str))
    elif id:
        print_whole(plan)
    else:
        print_plan(plan, err=False)
    if not as_json and (messages or arguments or bodies):
        print_messages(plan, show_arguments=arguments, show_bodies=bodies)
    if has_selection(options) and not plan.matching:
        click.echo(no_match(plan), err=True)
        sys.exit(NOTHING_MATCHED)


def _fail(ended: str, why: object, code: int, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps(finished(ended, str(why))))
    click.echo(f"Error: {safe(why, 2_000)}", err=True)
    sys.exit(code)
