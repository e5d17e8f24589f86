"""``celery sqs-health``: is the worker on this machine alive? For an exec probe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.observe.health import MAX_AGE_SECONDS, diagnosis

from .command import Command, drop_stdout
from .options import option

#: The worker's loops turn.
HEALTHY: Final = 0
#: They do not, or no worker touches the heartbeat file.
UNHEALTHY: Final = 1

_EPILOG = """\b
Exit codes: 0 healthy, 1 not, and why in one line, 2 usage.

\b
Examples:
  celery -A proj sqs-health
  celery sqs-health --file /run/worker.heartbeat
"""


@click.command("sqs-health", cls=Command, epilog=_EPILOG)
@option(
    "Where to look",
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The heartbeat file; no app is needed then. Default: the app's sqs_backoff['heartbeat'].",
)
@option(
    "Where to look",
    "--max-age",
    type=click.FloatRange(0, min_open=True),
    default=MAX_AGE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Take a worker for dead whose last heartbeat is older.",
)
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_health(ctx: click.Context, file: Path | None, max_age: float) -> None:
    """Say whether the worker that touches the heartbeat file is alive.

    Alive means that its threads receive, renew and settle. An outage of SQS and a long task do not
    make a worker unhealthy, because a restart would not help. SQS is not asked. The worker's log
    says what is wrong (sqs_backoff.unhealthy).
    """
    path = file or _path_of(ctx.obj.app.conf.get("sqs_backoff"))
    if path is None:
        raise click.UsageError(
            "no heartbeat file: set app.conf.sqs_backoff['heartbeat'] to a path that the worker"
            " and this command share, or give --file"
        )
    why = diagnosis(path, now=time.time(), max_age_seconds=max_age)
    try:
        click.echo("healthy" if why is None else f"unhealthy: {why}")
    except OSError:  # a full disk does not make a worker unhealthy
        drop_stdout()
    sys.exit(HEALTHY if why is None else UNHEALTHY)


def _path_of(settings: object) -> Path | None:
    heartbeat = settings.get("heartbeat") if isinstance(settings, Mapping) else None
    return Path(heartbeat) if heartbeat else None
