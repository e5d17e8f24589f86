"""``celery sqs-status``: count the messages of each queue."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import click

from celery_sqs_backoff.observe.board import Board, WorkerNow
from celery_sqs_backoff.observe.status import (
    MOST_NAMES,
    QueueStatus,
    Status,
    read_status,
    render,
    sum_providers,
    with_workers,
)
from celery_sqs_backoff.sqs.errors import Failure
from celery_sqs_backoff.sqs.find_queue import QueueFinder, connection_to_look, why_not
from celery_sqs_backoff.store.settings import has_store, is_store_shared
from celery_sqs_backoff.text import name_some

from .command import CommandFailed, app_of, command, make_read_failure
from .environment import open_records
from .exit_codes import DONE, UNREACHABLE
from .options import option, queues_option, select_queues

_NO_STORE: Final = "sqs_backoff['store'] is not set"
_OWN_STORE: Final = "sqs_backoff['store'] is one that workers do not share with this command"


@command(
    "sqs-status",
    codes={UNREACHABLE: "at least one queue cannot be read"},
    examples="""
        celery -A proj sqs-status
        watch -n 10 celery -A proj sqs-status -Q mails,bulk
        celery -A proj sqs-status --json | jq '.queues[] | select(.dead_letters > 0)'
    """,
)
@queues_option
@option("Output", "--json", "as_json", help="One JSON object; null = not known.")
def sqs_status(ctx: click.Context, queues: list[str] | None, as_json: bool) -> None:
    """Count the messages of each queue that are ready, waiting for a retry, running or dead.

    SQS reports running and waiting messages as one number, in flight. If you set
    sqs_backoff['store'], workers report both numbers, the age of messages and the state of
    providers every ten seconds. Without a store, "?" stands for these numbers. This command
    receives no message.
    """
    app = app_of(ctx, needs_sqs=True)
    select_queues(app, queues)
    status = _look(app, are_named=bool(queues))
    click.echo(json.dumps(status.as_dict()) if as_json else render(status))
    if as_json and status.why not in ("", _NO_STORE, _OWN_STORE):
        click.echo(f"Error: {status.why}", err=True)
    if as_json and (not_shown := status.not_shown()):
        click.echo(f"Warning: {not_shown}", err=True)
    failures = _list_failures(status.queues)
    for failure in failures:
        failure.show()
    sys.exit(max((failure.exit_code for failure in failures), default=DONE))


def _list_failures(queues: Sequence[QueueStatus]) -> list[CommandFailed]:
    """Return one error for each reason why queues could not be read."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for queue in queues:
        if queue.failure:
            names_of[queue.failure].append(queue.name)
    return [
        make_read_failure(
            f"{'queue' if len(names) == 1 else 'queues'} {name_some(names, MOST_NAMES)}", code
        )
        for code, names in names_of.items()
    ]


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
            finder = QueueFinder(connection.default_channel, attempts=2)
            return [_read_one(finder, name) for name in names]
    except Exception as exc:  # noqa: BLE001  # kombu and botocore may raise any of many types
        failure = why_not(exc)
        return [QueueStatus(name=name, failure=failure) for name in names]


def _read_one(finder: QueueFinder, name: str) -> QueueStatus:
    found = finder.find(name)
    if isinstance(found, Failure):
        return QueueStatus(name=name, failure=found.code)
    return read_status(name, found.queue_url, found.on)


def _workers(app: Any) -> tuple[list[WorkerNow] | None, str]:
    """Return the workers' records and an empty text, or ``None`` and the reason."""
    if not is_store_shared(app):
        return None, _OWN_STORE if has_store(app) else _NO_STORE
    try:
        return list(Board(open_records(app)).read().values()), ""
    except Exception as exc:  # noqa: BLE001  # the store's client may raise anything
        # Leave out the text of a client's error, because it may quote the URL with its password.
        return None, f"the store could not be read ({type(exc.__cause__ or exc).__name__})"
