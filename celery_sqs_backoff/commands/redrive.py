"""``celery sqs-redrive``: send dead letters back, at a rate that the provider can stand."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_sqs_backoff.redrive import (
    RedriveRefused,
    RedriveReport,
    RedriveUnreachable,
    peek,
    redrive,
)
from celery_sqs_backoff.redrive.archive import dump
from celery_sqs_backoff.redrive.plan import DEFAULT_SAMPLE, Plan

from .exit_codes import DONE, INTERRUPTED, SOME_FAILED, UNREACHABLE, USAGE, exit_code
from .options import ids_of, option, selection_options
from .show import LOOKED, JsonEvents, bar, plan_as_dict, print_plan, print_report

__all__ = ["sqs_redrive"]

#: A dry run with an archive looks at all there is.
_EVERYTHING = 10**9

_EPILOG = """\b
Exit codes:
  0    done
  1    some messages could not be sent or deleted
  2    wrong options, or refused: nothing was sent
  3    stopped by the gate: probe, canary, or messages coming back
  4    poison was found and left
  5    SQS is unreachable
  130  interrupted, or the question was answered with no
\b
Examples:
  celery -A proj sqs-redrive mail-dlq --dry-run --rate 10/s
  celery -A proj sqs-redrive mail-dlq --rate 10/s --ramp 10m --journal mail.journal
  celery -A proj sqs-redrive mail-dlq --rate 10/s --canary 20 --probe https://mail.example/health
  celery -A proj sqs-redrive mail-dlq --task 'mails.newsletter*' --delete --dump old.jsonl
  celery -A proj sqs-redrive --load old.jsonl --rate 5/s
"""


@click.command("sqs-redrive", cls=CeleryCommand, epilog=_EPILOG)
@click.argument("queue", required=False)
@option(
    "Where",
    "--to",
    metavar="QUEUE",
    help="Send all messages there. Default: each to where it came from.",
)
@option(
    "Where",
    "--load",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send the letters of this archive instead of a queue's.",
)
@selection_options
@option("Which messages", "--limit", type=click.IntRange(1), help="Send at most so many.")
@option(
    "Which messages",
    "--max-replays",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Leave messages that were replayed so often.",
)
@option(
    "Which messages",
    "--expired",
    type=click.Choice(["leave", "drop", "extend"]),
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
    "Gate",
    "--canary",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Send N first, and wait until they have left the main queue.",
)
@option(
    "Gate",
    "--canary-timeout",
    metavar="DURATION",
    default="10m",
    show_default=True,
    help="How long to wait for them.",
)
@option(
    "Safety",
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Note here what is sent. Run again with it after a kill: nothing is sent twice but"
    " what is named as in doubt.",
)
@option(
    "Safety",
    "--in-doubt",
    type=click.Choice(["resend", "hold"]),
    default="resend",
    show_default=True,
    help="What to do with messages that may have been sent.",
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
    "--engine",
    type=click.Choice(["client", "native"]),
    default="client",
    show_default=True,
    help="native: SQS itself moves everything (StartMessageMoveTask).",
)
@option(
    "Running",
    "--dry-run",
    is_flag=True,
    help="Only look, and say what would be done. With --dump: and copy.",
)
@option(
    "Running",
    "--sample",
    type=click.IntRange(1),
    default=DEFAULT_SAMPLE,
    show_default=True,
    help="Look at so many messages before asking.",
)
@option("Running", "--yes", "-y", is_flag=True, help="Do not look and ask first.")
@option("Running", "--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_redrive(
    ctx: click.Context,
    queue: str | None,
    id: tuple[str, ...],  # noqa: A002  # the option's name
    ids: Path | None,
    dry_run: bool,
    sample: int,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send the messages of a dead-letter queue back to where they came from.

    QUEUE: the dead-letter queue, or a queue that has one; a name, URL or ARN.

    Looks first and asks. A message is deleted when SQS has reported it as sent. Without --journal
    a killed run can send again what it had sent but not yet deleted.
    """
    options["ids"] = ids_of(id, ids)
    app = ctx.obj.app
    try:
        if dry_run:
            _dry_run(app, queue, options, sample=sample, as_json=as_json)
            sys.exit(DONE)
        if not yes and not _confirmed(app, queue, options, sample):
            sys.exit(INTERRUPTED)
        report = _run(app, queue, options, as_json=as_json)
    except (ValueError, TypeError, RedriveRefused) as exc:
        hint = " (--force)" if getattr(exc, "overridable", False) else ""
        click.echo(f"Error: {exc}{hint}", err=True)
        sys.exit(USAGE)
    except RedriveUnreachable as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(UNREACHABLE)
    except OSError as exc:  # journal or archive: the disk is full
        click.echo(f"Error: {exc}. The run has ended; what was not sent is given back.", err=True)
        sys.exit(SOME_FAILED)
    except KeyboardInterrupt:
        click.echo("Interrupted. What was not sent is shown again within 10 min.", err=True)
        sys.exit(INTERRUPTED)
    if not as_json:
        print_report(report)
    sys.exit(exit_code(report, in_doubt_is_held=options["in_doubt"] == "hold"))


def _dry_run(
    app: Any, queue: str | None, options: dict[str, Any], *, sample: int, as_json: bool
) -> None:
    archive: Path | None = options["dump"]
    plan = _look(app, queue, options, sample=_EVERYTHING if archive else sample, raw=bool(archive))
    if archive is not None:
        dump(plan.raw, [fact.destination for fact in plan.letters], archive)
    if as_json:
        shown = plan_as_dict(plan, show_arguments=False, show_bodies=False)
        click.echo(json.dumps(shown, default=str))
    else:
        print_plan(plan, err=False)
    click.echo(LOOKED, err=True)
    _refuse_if_too_late(plan, options)


def _confirmed(app: Any, queue: str | None, options: dict[str, Any], sample: int) -> bool:
    """Look, tell, and ask."""
    if options["load"] is not None:
        question = f"Send the letters of {options['load']}?"
    else:
        plan = _look(app, queue, options, sample=sample)
        print_plan(plan, err=True)
        click.echo(LOOKED, err=True)
        _refuse_if_too_late(plan, options)
        number = min(plan.to_send, options["limit"] or plan.to_send)
        about = "" if plan.looked_at >= plan.messages else "about "
        what = "DELETE, without sending," if options["delete"] else "Send"
        rate = f" at {options['rate']}" if options["rate"] else ", as fast as SQS takes them"
        question = f"{what} {about}{number} messages{'' if options['delete'] else rate}?"
        if options["expired"] == "drop" and plan.expired and not options["delete"]:
            question += f" And DELETE those that have expired, {plan.expired} of those looked at?"
        question += " There is no undo."
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        return False


def _look(
    app: Any, queue: str | None, options: dict[str, Any], *, sample: int, raw: bool = False
) -> Plan:
    if queue is None:
        raise ValueError("QUEUE: name the dead-letter queue, or a queue that has one")
    engine_only = ("load", "engine")
    wanted = {name: value for name, value in options.items() if name not in engine_only}
    return peek(app, queue, sample=sample, raw=raw, **wanted)


def _refuse_if_too_late(plan: Plan, options: dict[str, Any]) -> None:
    if plan.is_too_late and not options["force"]:
        raise RedriveRefused(
            "SQS will delete the oldest messages before their turn comes. Raise the rate, or the"
            " queue's retention period.",
            overridable=True,
        )


def _run(app: Any, queue: str | None, options: dict[str, Any], *, as_json: bool) -> RedriveReport:
    with _until_signalled() as stop, nullcontext(JsonEvents()) if as_json else bar() as on_event:
        return redrive(app, queue, on_event=on_event, stop=stop, **options)


@contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    """Set the event on the first SIGINT or SIGTERM; a second one does not wait for giving back."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        click.echo("Finishing what is under way; the rest is given back.", err=True)
        for signalled, handler in before.items():
            signal.signal(signalled, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for signalled, handler in before.items():
            signal.signal(signalled, handler)
