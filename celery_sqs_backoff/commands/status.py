"""``celery sqs-status``: how many messages are where?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.observe.board import Board, WorkerNow
from celery_sqs_backoff.observe.status import (
    ProviderStatus,
    QueueStatus,
    provider_status,
    read_status,
    with_workers,
)
from celery_sqs_backoff.safe.stores import is_shared
from celery_sqs_backoff.sqs.errors import Failure
from celery_sqs_backoff.sqs.find_queue import connection_to_look, find_queue, why_not
from celery_sqs_backoff.units import in_words

from .command import Command, console_of_stdout
from .environment import open_vault
from .options import option, queues_option, select_queues

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

__all__ = ["COULD_NOT_READ", "DONE", "sqs_status"]

#: Wide enough for the longest name of a queue, where no terminal sets a limit.
_PIPE_COLUMNS: Final = 160

#: A longer name of a queue may be folded to so many columns, where the terminal is narrow.
_LEAST_NAME_COLUMNS: Final = 12

#: Queues that a line names, and providers with a line of their own; a full screen has room for few
#: lines beside the numbers.
_MOST_NAMES: Final = 5

_NO_STORE: Final = "sqs_backoff['store'] is not set"
_OWN_STORE: Final = "sqs_backoff['store'] is one that workers do not share with this command"

#: From here on it is worth a word that SQS deletes a message.
_SOON_DELETED_SECONDS: Final = 24 * 3600.0

#: All queues were read.
DONE: Final = 0
#: At least one queue could not be read.
COULD_NOT_READ: Final = 5

_EPILOG = """\b
Exit codes: 0 all queues were read, 5 at least one was not, 2 usage.

\b
Examples:
  celery -A proj sqs-status
  celery -A proj sqs-status -Q mails,bulk --watch
  celery -A proj sqs-status --json | jq '.queues[] | select(.dead_letters > 0)'
"""


@click.command("sqs-status", cls=Command, epilog=_EPILOG)
@queues_option
@option("Output", "--json", "as_json", is_flag=True, help="One JSON object; null is not known.")
@option("Output", "--watch", is_flag=True, help="Go on until Ctrl-C, on a terminal.")
@option(
    "Output",
    "--interval",
    type=click.FloatRange(1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks with --watch. A look costs two calls per queue.",
)
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_status(
    ctx: click.Context, queues: list[str] | None, as_json: bool, watch: bool, interval: float
) -> None:
    """Show the numbers of each queue that the app's workers consume.

    SQS counts messages in flight: those that run, wait in a worker, or wait for a retry. Which is
    which, how old they are, and what providers do, workers write to the store
    (sqs_backoff['store']) every ten seconds; without a store it is not known. Messages are not
    received.
    """
    app = ctx.obj.app
    select_queues(app, queues)
    if watch:
        if as_json or not _has_terminal():
            raise click.UsageError("--watch needs a terminal: without it, each call is one look")
        _watch(app, interval, are_named=bool(queues))
        return
    seen = _look(app, are_named=bool(queues))
    if as_json:
        click.echo(json.dumps(_as_dict(seen)))
        if seen.is_store_away:
            click.echo(f"Error: {seen.why}", err=True)
        if seen.others:
            click.echo(f"Warning: {_not_shown(seen)}", err=True)
    else:
        console = console_of_stdout(width=None if _has_terminal() else _PIPE_COLUMNS)
        console.print(_shown(seen, console.width))
    for queue in seen.queues:
        if queue.failure:
            click.echo(f"Error: cannot read queue {queue.name}: {queue.failure}", err=True)
    sys.exit(COULD_NOT_READ if any(queue.failure for queue in seen.queues) else DONE)


def _has_terminal() -> bool:
    return sys.stdout.isatty()


def _watch(app: Any, interval: float, *, are_named: bool) -> None:
    from rich.live import Live

    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                seen = _look(app, are_named=are_named)
                live.update(_screen(seen, live.console), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


@dataclass(frozen=True)
class _Seen:
    """One look. ``workers``: how many have written; ``None``: nobody could, for ``why``."""

    queues: list[QueueStatus]
    providers: list[ProviderStatus]
    at: float
    workers: int | None
    why: str = ""
    #: Queues that workers receive from, by their names on SQS, and that are not shown, though
    #: nobody has said which to show.
    others: tuple[str, ...] = ()
    #: There is a store, and it could not be read; else nobody has set one, or it was read.
    is_store_away: bool = False


def _look(app: Any, *, are_named: bool) -> _Seen:
    queues, now = _read(app), time.time()
    workers, why = _workers(app)
    if workers is None:
        is_away = why not in (_NO_STORE, _OWN_STORE)
        return _Seen(queues, [], now, None, why, is_store_away=is_away)
    queues = [with_workers(queue, workers, now=now) for queue in queues]
    theirs = {name for worker in workers for name in worker.queues}
    others = set() if are_named else theirs - {q.sqs_name for q in queues}
    return _Seen(queues, provider_status(workers), now, len(workers), others=tuple(sorted(others)))


def _read(app: Any) -> list[QueueStatus]:
    names = list(app.amqp.queues.consume_from)
    try:
        with connection_to_look(app) as connection:
            if (broker := connection.transport.driver_type) != "sqs":
                return [QueueStatus(name=name, failure=f"the broker is {broker}") for name in names]
            channel = connection.default_channel
            return [_read_one(channel, name) for name in names]
    except Exception as exc:  # noqa: BLE001  # whatever keeps us from SQS, of no queue we know more
        failure = why_not(exc)
        return [QueueStatus(name=name, failure=failure) for name in names]


def _read_one(channel: Any, name: str) -> QueueStatus:
    found = find_queue(channel, name)
    if isinstance(found, Failure):
        return QueueStatus(name=name, failure=found.code)
    return read_status(name, *found)


def _workers(app: Any) -> tuple[list[WorkerNow] | None, str]:
    settings = app.conf.get("sqs_backoff")
    store = settings.get("store") if isinstance(settings, Mapping) else None
    if not is_shared(store):
        return None, _NO_STORE if store is None else _OWN_STORE
    try:
        return list(Board(open_vault(app)).read().values()), ""
    except Exception as exc:  # noqa: BLE001  # the store's client may raise anything
        # Not its text: a client's error may quote the URL, with its password.
        return None, f"the store could not be read ({type(exc.__cause__ or exc).__name__})"


def _as_dict(seen: _Seen) -> dict[str, Any]:
    return {
        "queues": [queue.as_dict() for queue in seen.queues],
        "providers": [asdict(provider) for provider in seen.providers],
    }


_COLUMNS = (
    *("queue", "ready", "waiting", "running", "in flight", "quota", "delayed", "dead", "oldest"),
)


def _shown(seen: _Seen, width: int) -> Group:
    from rich.console import Group

    return Group(*_numbers(seen, width), *_notes(seen))


def _screen(seen: _Seen, console: Console) -> Group:
    """The time of the look, for the next may take a while; what there is to say; the table.

    A full screen shows the first lines alone, so the queues that have messages come first.
    """
    from rich.console import Group
    from rich.text import Text

    seen = replace(seen, queues=sorted(seen.queues, key=lambda q: q.has_nothing))
    at = time.strftime("%H:%M:%S %Z", time.localtime(seen.at))
    head, notes = Text(f"seen at {at}", style="dim"), list(_notes(seen))
    room = console.height // 2
    screen = Group(head, *notes[:room], *_numbers(seen, console.width))
    if len(notes) > room or len(console.render_lines(screen)) > console.height:
        head.append("; more than fits: name queues with -Q", style="yellow")
    return screen


def _numbers(seen: _Seen, width: int) -> list[Table] | list[Text]:
    rows = [_COLUMNS, *map(_cells, seen.queues)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = min(widths[0], _LEAST_NAME_COLUMNS) + sum(widths[1:]) + 2 * (len(widths) - 1)
    return list(_lines(seen)) if least > width else [_table(seen)]


def _table(seen: _Seen) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*_COLUMNS, box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for queue in seen.queues:
        name, *numbers, dead, oldest = _cells(queue)
        style = "bold red" if queue.dead_letters else ""
        table.add_row(Text(name), *numbers, Text(dead, style=style), oldest)
    return table


def _lines(seen: _Seen) -> Iterator[Text]:
    """For a terminal that is too narrow for the table, which would leave out names."""
    from rich.text import Text

    for queue in seen.queues:
        name, *cells = _cells(queue)
        pairs = zip(_COLUMNS[1:], cells, strict=True)
        yield Text(f"{name}: {', '.join(f'{column} {cell}' for column, cell in pairs)}")


def _cells(queue: QueueStatus) -> tuple[str, ...]:
    share = queue.in_flight_share
    return (
        queue.name,
        *map(_number, (queue.ready, queue.waiting, queue.running, queue.in_flight)),
        "?" if share is None else f"{share:.1%}",
        _number(queue.delayed),
        _number(queue.dead_letters) if queue.has_dlq else "-",
        _age(queue),
    )


def _notes(seen: _Seen) -> Iterator[Text]:
    from rich.text import Text

    yield from (Text(line, style="yellow") for line in _down(seen.providers))
    for fault, names in _unread(seen.queues).items():
        yield Text(f"{_named(names)}: {fault}", style="red")
    if seen.others:
        yield Text(_not_shown(seen), style="yellow")
    if seen.workers is None:
        yield Text(f"? is not known: {seen.why}", style="dim")
        return
    unknown = [q.name for q in seen.queues if not (q.workers or q.is_empty or q.failure)]
    if unknown:
        of = f" of {_named(unknown)}" if seen.workers else ""
        why = f"no worker{of} has written within the last minute"
        yield Text(f"? is not known: {why}", style="dim")
    for queue in seen.queues:
        yield from (Text(f"{queue.name}: {said}") for said in _outlook(queue, seen.at))


def _down(providers: Iterable[ProviderStatus]) -> Iterator[str]:
    """A line for each of those that most waits for: with a key, each tenant's gate is one."""
    down = sorted((p for p in providers if p.state != "closed"), key=lambda p: -p.waiting)
    for one in down[:_MOST_NAMES]:
        yield f"provider {one.name} is down ({one.state}): {one.waiting} messages wait for it"
    if more := down[_MOST_NAMES:]:
        waiting = sum(one.waiting for one in more)
        yield f"{len(more)} more providers are down: {waiting} messages wait for them"


def _unread(queues: Iterable[QueueStatus]) -> dict[str, list[str]]:
    """What could not be read, and of which queues: mostly the same of many, as a role is wrong."""
    found: dict[str, list[str]] = {}
    for queue in queues:
        if queue.failure:
            found.setdefault(queue.failure, []).append(queue.name)
        elif queue.has_dlq and queue.dead_letters is None:
            found.setdefault("dead-letter queue cannot be read", []).append(queue.name)
    return found


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _not_shown(seen: _Seen) -> str:
    return f"not shown: workers also receive from {_named(seen.others)}; name queues with -Q"


def _outlook(queue: QueueStatus, now: float) -> Iterator[str]:
    if queue.unaccounted:
        yield (
            f"{queue.unaccounted} messages in flight are known to no worker that runs: hidden"
            " before a deploy or a crash"
        )
    if queue.giving_up and queue.next_gives_up_at is not None:
        first = in_words(max(0.0, queue.next_gives_up_at - now))
        yield (
            f"next: {queue.giving_up} message{'' if queue.giving_up == 1 else 's'} give up within"
            f" 2 hours, the first in {first}"
        )
    if queue.deleted_in_seconds is not None and queue.deleted_in_seconds < _SOON_DELETED_SECONDS:
        yield f"SQS deletes the oldest message in {in_words(max(0.0, queue.deleted_in_seconds))}"
    if queue.given_up:
        reasons = sorted(queue.given_up.items(), key=lambda pair: -pair[1])
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons)
        yield f"given up by the workers since they started: {listed}"


def _age(queue: QueueStatus) -> str:
    if queue.oldest_seconds is not None:
        return in_words(queue.oldest_seconds)
    return "-" if queue.is_empty else "?"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
