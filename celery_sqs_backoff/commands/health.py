"""``celery sqs-health``: report to an exec probe whether the worker on this machine is alive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from celery_sqs_backoff.observe.health import MAX_AGE_SECONDS, diagnosis

from .command import CommandFailed, app_of, command
from .exit_codes import DONE, FOUND, USAGE
from .options import FILE, option


@command(
    "sqs-health",
    codes={DONE: "healthy", FOUND: "unhealthy; stdout has the reason"},
    examples="""
        celery -A proj sqs-health
        celery sqs-health --file /run/worker.heartbeat
    """,
)
@option(
    "Where to look",
    "--file PATH",
    type=FILE,
    help="The heartbeat file; no app is needed then. [default: the app's sqs_backoff['heartbeat']]",
)
@option(
    "Where to look",
    "--max-age SECONDS",
    type=click.FloatRange(0, min_open=True),
    default=MAX_AGE_SECONDS,
    help="Report a worker as unhealthy if its last heartbeat is older.",
)
def sqs_health(ctx: click.Context, file: Path | None, max_age: float) -> None:
    """Report whether the worker that touches the heartbeat file is alive.

    A worker receives, renews and deletes messages in several threads. It is alive if these threads
    run and do not hang. An outage of SQS or a long task does not make a worker unhealthy, because a
    restart would not help.
    The command does not ask SQS. If a worker is unhealthy, its log names the cause
    (sqs_backoff.unhealthy).
    """
    path = file or _path_of(app_of(ctx).conf.get("sqs_backoff"))
    if path is None:
        raise CommandFailed(
            "no heartbeat file: set app.conf.sqs_backoff['heartbeat'] to a path that the worker"
            " and this command share, or give --file",
            USAGE,
        )
    why = diagnosis(path, now=time.time(), max_age_seconds=max_age)
    try:
        click.echo("healthy" if why is None else f"unhealthy: {why}")
    except OSError:  # even if stdout fails, the exit code must say whether the worker is healthy
        _drop_stdout()
    sys.exit(DONE if why is None else FOUND)


def _path_of(settings: object) -> Path | None:
    heartbeat = settings.get("heartbeat") if isinstance(settings, Mapping) else None
    return Path(heartbeat) if heartbeat else None


def _drop_stdout() -> None:
    """Discard the text that is still to be written to stdout.

    Otherwise Python tries to write it again at its exit, prints an error, and changes the exit
    code.
    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
