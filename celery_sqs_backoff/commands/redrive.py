"""``celery sqs-redrive``: send dead letters back to their queues, at a limited rate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .command import app_of, command
from .environment import interrupt_on_signals, journal_directory
from .exit_codes import FOUND, GATE, INCOMPLETE, NOTHING_MATCHED, POISON, UNREACHABLE
from .options import FILE, READABLE_FILE, ids_of, option, selection_options
from .redrive_shell import Shell, exit_code

_WHICH, _SPEED, _SAFETY = "Which messages", "How fast", "Safety and output"


@command(
    "sqs-redrive",
    codes={
        FOUND: "some messages failed, or may have been sent",
        **dict.fromkeys((GATE, POISON, UNREACHABLE, INCOMPLETE, NOTHING_MATCHED)),
    },
)
@click.argument("queue")
@option(_WHICH, "--to QUEUE", help="Send all to QUEUE. [default: where each came from]")
@selection_options
@option(_WHICH, "--include-unknown", help="Also send messages that may be done already.")
@option(_WHICH, "--limit N", type=click.IntRange(1), help="Send at most N messages in this run.")
@option(
    _WHICH,
    "--max-replays N",
    type=click.IntRange(1),
    default=3,
    help="Skip messages replayed N times.",
)
@option(
    _WHICH,
    "--expired",
    type=click.Choice(["leave", "extend"]),
    default="leave",
    help="Skip expired tasks or extend them.",
)
@option(_SPEED, "--rate RATE", help="Such as 10/s, 300/m. [default: no limit]")
@option(
    _SPEED,
    "--ramp DURATION",
    help="Start at a tenth of --rate and reach it after this long, for example 10m.",
)
@option(_SPEED, "--spread DURATION", help="Delay each at random, up to this (at most 15m).")
@option(
    _SPEED,
    "--probe URL|MODULE:CALLABLE",
    help="Ask this every 5 s if the provider is healthy. The third failure in a row ends the run.",
)
@option(
    _SAFETY,
    "--journal FILE",
    type=FILE,
    help="Record sent messages here. After a kill, the same command skips them."
    " 'none': no record. [default: one file per queue]",
)
@option(_SAFETY, "--dump FILE", type=FILE, help="First append messages, with bodies, to this file.")
@option(_SAFETY, "--delete", help="Delete instead of sending. Needs --dump.")
@option(
    _SAFETY,
    "--restore FILE",
    type=READABLE_FILE,
    help="Put an archive's messages back on QUEUE, each once.",
)
@option(_SAFETY, "--dry-run", help="Look, and predict the result without sending.")
@option(_SAFETY, "--yes", "-y", help="Send without asking.")
@option(
    _SAFETY,
    "--force",
    help="Continue even if SQS will delete messages before they can be sent, or if the"
    " dead-letter queue has one itself.",
)
@option(_SAFETY, "--json", "as_json", help="Print events as JSON lines.")
def sqs_redrive(
    ctx: click.Context,
    queue: str,
    id: tuple[str, ...],  # noqa: A002  # the option's name
    ids: Path | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send the messages of a dead-letter queue back to where they came from.

    QUEUE is a name, URL or ARN of the dead-letter queue, or of the queue that it belongs to. The
    command first looks at the messages and asks you. It deletes a message only after SQS has
    confirmed that it was sent.
    """
    shell = Shell(app_of(ctx), queue, options, as_json=as_json)
    with shell.ending(), interrupt_on_signals():
        options["ids"] = ids_of(id, ids)
        if dry_run:
            sys.exit(shell.dry_run())
        if options["journal"] == Path("none"):
            if options["restore"] is not None:
                raise ValueError(
                    "--restore cannot be used with --journal none: without the record, a second"
                    " restore would double messages"
                )
            options["journal"] = None
        elif options["journal"] is None and options["restore"] is None:
            options["journal"] = journal_directory()
        if (code := shell.ask(is_answered=yes)) is not None:
            sys.exit(code)
        report = shell.run()
    shell.print(report)
    sys.exit(exit_code(report, options))
