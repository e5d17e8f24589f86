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

_WHICH, _SPEED, _SAFETY = "Which messages", "How fast", "Safety and output"

_EPILOG = """\b
Exit codes: 0 done, 1 some could not be sent or deleted, or are in doubt, or
a file cannot be written, 2 refused, 3 stopped by the probe or by messages
coming back, 4 poison was left, 5 SQS is unreachable, 6 not complete,
7 no message matched, 130 interrupted or answered with no.
"""


@click.command("sqs-redrive", cls=Command, epilog=_EPILOG)
@click.argument("queue")
@option(_WHICH, "--to", metavar="QUEUE", help="Send all there. [default: where each came from]")
@selection_options
@option(
    _WHICH,
    "--include-unknown",
    is_flag=True,
    help="Send those that may have been done or sent before.",
)
@option(
    _WHICH,
    "--limit",
    metavar="N",
    type=click.IntRange(1),
    help="Send at most N messages in this run.",
)
@option(
    _WHICH,
    "--max-replays",
    metavar="N",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Leave those replayed N times.",
)
@option(
    _WHICH,
    "--expired",
    type=click.Choice(["leave", "extend"]),
    default="leave",
    show_default=True,
    help="Extend the life of expired tasks.",
)
@option(_SPEED, "--rate", metavar="RATE", help="10/s, 300/m. [default: as fast as SQS]")
@option(
    _SPEED,
    "--ramp",
    metavar="DURATION",
    help="Start at a tenth of --rate and reach it after this long, for example 10m.",
)
@option(
    _SPEED,
    "--spread",
    metavar="DURATION",
    help="Delay each by up to this, 15m at most; not FIFO.",
)
@option(
    _SPEED,
    "--probe",
    metavar="URL|MODULE:CALLABLE",
    help="Check this before the start and every 5 seconds. The third failure in a row stops.",
)
@option(
    _SAFETY,
    "--journal",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record what was sent here, for the same command after a kill; or none. [default: one"
    " file per queue]",
)
@option(
    _SAFETY,
    "--dump",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append all to this archive first, with bodies.",
)
@option(_SAFETY, "--delete", is_flag=True, help="Delete instead of sending. Needs --dump.")
@option(
    _SAFETY,
    "--restore",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put an archive back on QUEUE, each message once.",
)
@option(_SAFETY, "--dry-run", is_flag=True, help="Look, and say what would be done.")
@option(_SAFETY, "--yes", "-y", is_flag=True, help="Send without asking.")
@option(
    _SAFETY,
    "--force",
    is_flag=True,
    help="Continue even if SQS will delete messages first, or if the dead-letter queue has one.",
)
@option(_SAFETY, "--json", "as_json", is_flag=True, help="Print events as JSON lines.")
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

    QUEUE is the dead-letter queue or a queue that has one: a name, URL or ARN. The command looks
    first and asks. It deletes a message when SQS has reported it as sent.
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
