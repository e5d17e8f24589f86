"""``celery sqs-peek``: show the content of a dead-letter queue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from celery_sqs_backoff.redrive.look import DEFAULT_SAMPLE
from celery_sqs_backoff.redrive.options import has_selection

from .command import app_of, command
from .environment import interrupt_on_signals
from .exit_codes import FOUND, UNREACHABLE
from .options import ids_of, option, selection_options
from .redrive_shell import Shell
from .show import describe_cost, no_match, plan_as_dict, print_messages, print_plan, print_whole


@command(
    "sqs-peek",
    codes={FOUND: "no message matched", UNREACHABLE: None},
    examples="""
        celery -A proj sqs-peek mail-dlq
        celery -A proj sqs-peek mail-dlq --task 'mails.*' --messages
        celery -A proj sqs-peek mail-dlq --id 4f2c...
        celery -A proj sqs-peek mail-dlq --json | jq .by_reason
    """,
)
@click.argument("queue")
@selection_options
@option(
    "Output",
    "--sample N",
    type=click.IntRange(1),
    default=DEFAULT_SAMPLE,
    help="Look at up to N messages.",
)
@option("Output", "--messages", help="List the messages, one per line.")
@option(
    "Output",
    "--arguments",
    help="Show each message's arguments (your users' data), or its body if they are not JSON.",
)
@option(
    "Output",
    "--force",
    help="Look even if the dead-letter queue has one itself. SQS may move messages there.",
)
@option("Output", "--json", "as_json", help="JSON on stdout.")
def sqs_peek(
    ctx: click.Context,
    queue: str,
    id: tuple[str, ...],  # noqa: A002  # the option's name
    ids: Path | None,
    messages: bool,
    arguments: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Count the messages of a dead-letter queue by task, outcome, reason and age.

    QUEUE is a name, URL or ARN of the dead-letter queue, or of the queue that it belongs to.

    With --id the command shows all facts of the message, including its traceback. For that it looks
    at all messages of the queue.

    The command gives all messages back to the queue. But SQS counts one more receive of each.
    """
    shell = Shell(app_of(ctx), queue, options, as_json=as_json)
    if id and ctx.get_parameter_source("sample") is ParameterSource.DEFAULT:
        options["sample"] = None
    with shell.ending(), interrupt_on_signals():
        options["ids"] = ids_of(id, ids)
        plan = shell.look(raw=arguments or bool(id))
    click.echo(describe_cost(plan), err=True)
    if as_json:
        shown = plan_as_dict(plan, show_arguments=arguments)
        click.echo(json.dumps(shown, default=str))
    elif id:
        print_whole(plan)
    else:
        print_plan(plan, err=False)
    if not as_json and (messages or arguments):
        print_messages(plan, show_arguments=arguments)
    if has_selection(options) and not plan.matching:
        click.echo(no_match(plan), err=True)
        sys.exit(FOUND)
