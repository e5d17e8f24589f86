"""``celery sqs-status``: how many messages are where?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.observe.board import Board, WorkerNow
from celery_sqs_backoff.observe.status import (
    QueueStatus,
    Status,
    read_status,
    render,
    sum_providers,
    with_workers,
)
from celery_sqs_backoff.sqs.errors import Failure
from celery_sqs_backoff.sqs.find_queue import QueueFinder, connection_to_look, why_not
from celery_sqs_backoff.store.urls import is_shared

from .command import Command
from .environment import open_vault
from .options import option, queues_option, select_queues

#: All queues were read.
DONE: Final = 0
#: At least one queue could not be read.
COULD_NOT_READ: Final = 5

_NO_STORE: Final = "sqs_backoff['store'] is not set"
_OWN_STORE: Final = "sqs_backoff['store'] is one that workers do not share with this command"

_EPILOG = """\b
Exit codes: 0 all queues were read, 5 at least one was not, 2 usage.

\b
Examples:
  celery -A proj sqs-status
  watch -n 10 celery -A proj sqs-status -Q mails,bulk
  celery -A proj sqs-status --json | jq '.queues[] | select(.dead_letters > 0)'
"""


@click.command("sqs-status", cls=Command, epilog=_EPILOG)
@queues_option
@option("Output", "--json", "as_json", is_flag=True, help="One JSON object; null is not known.")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_status(ctx: click.Context, queues: list[str] | None, as_json: bool) -> None:
    """Show how many messages each queue has: ready, waiting for a retry, running, dead.

    SQS reports running and waiting messages as one number, in flight. Workers report the split,
    the age of messages and the state of providers every ten seconds if you set
    sqs_backoff['store']; without it you see "?". This command receives no message.
    """
    app = ctx.obj.app
    select_queues(app, queues)
    status = _look(app, are_named=bool(queues))
    click.echo(json.dumps(status.as_dict()) if as_json else render(status))
    if as_json and status.why not in ("", _NO_STORE, _OWN_STORE):
        click.echo(f"Error: {status.why}", err=True)
    if as_json and (not_shown := status.not_shown()):
        click.echo(f"Warning: {not_shown}", err=True)
    failed = [queue for queue in status.queues if queue.failure]
    for queue in failed:
        click.echo(f"Error: cannot read queue {queue.name}: {queue.failure}", err=True)
    sys.exit(COULD_NOT_READ if failed else DONE)


def _look(app: Any, *, are_named: bool) -> Status:
    queues, now = _read(app), time.time()
    workers, why = _workers(app)
    if workers is None:
        return Status(queues=queues, why=why)
    queues = [with_workers(queue, workers, now=now) for queue in queues]
    theirs = {name for worker in workers for name in worker.queues}
    return Status(
        queues=queues,
        providers=sum_providers(workers),
        workers=len(workers),
        others=() if are_named else sorted(theirs - {queue.sqs_name for queue in queues}),
    )


def _read(app: Any) -> list[QueueStatus]:
    names = list(app.amqp.queues.consume_from)
    try:
        with connection_to_look(app) as connection:
            if (broker := connection.transport.driver_type) != "sqs":
                return [QueueStatus(name=name, failure=f"the broker is {broker}") for name in names]
            finder = QueueFinder(connection.default_channel, attempts=2)
            return [_read_one(finder, name) for name in names]
    except Exception as exc:  # noqa: BLE001  # kombu and botocore raise many types
        failure = why_not(exc)
        return [QueueStatus(name=name, failure=failure) for name in names]


def _read_one(finder: QueueFinder, name: str) -> QueueStatus:
    found = finder.find(name)
    if isinstance(found, Failure):
        return QueueStatus(name=name, failure=found.code)
    return read_status(name, found.queue_url, found.on)


def _workers(app: Any) -> tuple[list[WorkerNow] | None, str]:
    """Return the records of workers, or ``None`` and the reason."""
    settings = app.conf.get("sqs_backoff")
    store = settings.get("store") if isinstance(settings, Mapping) else None
    if not is_shared(store):
        return None, _NO_STORE if store is None else _OWN_STORE
    try:
        return list(Board(open_vault(app)).read().values()), ""
    except Exception as exc:  # noqa: BLE001  # the store's client may raise anything
        # The text of a client's error may quote the URL, with its password.
        return None, f"the store could not be read ({type(exc.__cause__ or exc).__name__})"
