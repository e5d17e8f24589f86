"""``celery sqs-redrive``: send dead letters back, at a rate that the provider can stand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.redrive import RedriveError, RedriveRefused, RedriveUnreachable

from .command import Command
from .environment import interrupted_by_signals, journal_directory
from .exit_codes import INTERRUPTED, SOME_FAILED, UNREACHABLE, USAGE, exit_code
from .options import has_selection, ids_of, option, selection_options
from .redrive_shell import Shell
from .text import safe

__all__ = ["sqs_redrive"]

_EPILOG = """\b
Exit codes:
  0    done
  1    some messages could not be sent or deleted, or are held in doubt; or a file could not
       be written
  2    wrong options, or refused: nothing was sent
  3    stopped by the gate: probe, or messages coming back
  4    poison was found and left
  5    SQS is unreachable, or does not let us
  6    not complete: messages are left that could not be received
  7    with a filter: no message matched, or none of those that did may be sent
  130  interrupted, or the question was not answered with yes
\b
Examples:
  celery -A proj sqs-redrive mail-dlq --dry-run --rate 10/s
  celery -A proj sqs-redrive mail-dlq --rate 10/s --ramp 10m
  celery -A proj sqs-redrive mail-dlq --rate 10/s --limit 20
  celery -A proj sqs-redrive mail-dlq --rate 10/s --probe https://mail.example/health
  celery -A proj sqs-redrive mail-dlq --task 'mails.newsletter*' --delete --dump old.jsonl
  celery -A proj sqs-redrive mail-dlq --restore old.jsonl
"""


@click.command("sqs-redrive", cls=Command, epilog=_EPILOG)
@click.argument("queue")
@option(
    "Where",
    "--to",
    metavar="QUEUE",
    help="Send all messages there. Default: each to where it came from.",
)
@option(
    "Where",
    "--restore",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the messages of this archive (--dump) back on QUEUE, each once. FILE.restored records"
    " what was put back.",
)
@selection_options
@option(
    "Which messages",
    "--include-unknown",
    is_flag=True,
    help="Also messages that may have been done already (outcome UNKNOWN) or sent already (in"
    " doubt). Otherwise they are left, or you are asked.",
)
@option(
    "Which messages", "--limit", type=click.IntRange(1), help="Send at most N messages, each time."
)
@option(
    "Which messages",
    "--max-replays",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Leave messages that were already replayed N times.",
)
@option(
    "Which messages",
    "--expired",
    type=click.Choice(["leave", "extend"]),
    default="leave",
    show_default=True,
    help="What to do with tasks whose expiry has passed: workers would throw them away.",
)
@option(
    "How fast",
    "--rate",
    metavar="RATE",
    help="Messages per second, minute or hour: 10/s, 300/m. Default: as fast as SQS.",
)
@option(
    "How fast",
    "--ramp",
    metavar="DURATION",
    help="Begin at a tenth of the rate, be at the rate after this: 10m.",
)
@option(
    "How fast",
    "--spread",
    metavar="DURATION",
    help="Give each message a random delay of up to this: 15m at most. Not on FIFO queues.",
)
@option(
    "Gate",
    "--probe",
    metavar="URL|MODULE:CALLABLE",
    help="Must be good (2xx; anything but False) before the start and all along.",
)
@option(
    "Safety",
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record what was sent in this file. If the run is killed, run the same command again: it"
    " skips those messages and lists the few that may be sent twice. none: keep no journal."
    " Default: one file per queue in ~/.local/state/celery-sqs-backoff.",
)
@option(
    "Safety",
    "--dump",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append all messages to this archive before they are sent. It holds their bodies.",
)
@option(
    "Safety",
    "--delete",
    is_flag=True,
    help="Delete the messages instead of sending them. Needs --dump.",
)
@option(
    "Safety",
    "--force",
    is_flag=True,
    help="Go on although SQS will delete messages before their turn, or the dead-letter queue"
    " has one itself.",
)
@option(
    "Running",
    "--dry-run",
    is_flag=True,
    help="Only look, and say what would be done. With --dump: look at all, and copy.",
)
@option("Running", "--yes", "-y", is_flag=True, help="Do not ask first.")
@option("Running", "--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
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

    QUEUE: the dead-letter queue, or a queue that has one; a name, URL or ARN.

    Looks first and asks. A message is deleted when SQS has reported it as sent. The journal names
    what a killed run may have sent: run the same command again to go on.
    """
    shell = Shell(ctx.obj.app, queue, options, as_json=as_json)
    try:
        options["ids"] = ids_of(id, ids)
        with interrupted_by_signals():
            if dry_run:
                sys.exit(shell.dry_run())
            if options["journal"] == Path("none"):
                options["journal"] = None
            elif options["journal"] is None and options["restore"] is None:
                options["journal"] = journal_directory()
            if yes:
                shell.refuse_if_too_late()
            elif (code := shell.ask()) is not None:
                sys.exit(code)
            report = shell.run()
    except (ValueError, TypeError, RedriveRefused) as exc:
        hint = " (--force)" if getattr(exc, "overridable", False) else ""
        shell.end("refused", f"{exc}{hint}")
        click.echo(f"Error: {safe(exc, 2_000)}{hint}", err=True)
        sys.exit(USAGE)
    except RedriveUnreachable as exc:
        shell.fail("unreachable", str(exc))
        click.echo(f"Error: {safe(exc, 2_000)}", err=True)
        sys.exit(UNREACHABLE)
    except (RedriveError, OSError) as exc:  # the archive of a dry run: the disk is full
        if dry_run and isinstance(exc, BrokenPipeError):
            raise
        shell.fail("failed", str(exc))
        click.echo(f"Error: {safe(exc)}. What was not sent is given back.", err=True)
        sys.exit(SOME_FAILED)
    except KeyboardInterrupt:
        shell.fail("interrupted", "by a signal")
        click.echo("Interrupted. What was not sent is shown again within 15 min.", err=True)
        sys.exit(INTERRUPTED)
    code = exit_code(
        report,
        in_doubt_is_held=not options["include_unknown"],
        has_selection=has_selection(options),
    )
    try:
        shell.print(report)
        sys.stdout.flush()
    except OSError as exc:
        click.echo(
            f"Error: cannot print the result: {exc.strerror}. {safe(report, 2_000)}", err=True
        )
        code = code or SOME_FAILED
    sys.exit(code)
