"""Collect and show the state of each queue in numbers. ``None`` = the number is not known.

SQS counts messages that are ready, in flight and delayed. Only the workers know which messages in
flight are running and which wait for a retry. If the app names a store, the workers publish these
numbers (:mod:`.board`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..sqs.calls import Calls
from ..sqs.errors import Failure
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from ..sqs.queues import count_messages, describe_queue, queue_name
from ..text import name_some
from ..units import in_words
from .board import ProviderNow, QueueNow, WorkerNow, find_first

#: Fields of a queue that ``sqs-status --json`` prints.
_PUBLISHED: Final = (
    *("name", "ready", "waiting", "running", "delayed"),
    *("dead_letters", "oldest_seconds", "in_flight_share"),
)

#: SQS's counts are approximate, so the status ignores a difference of up to this number.
_FEW: Final = 20

#: A line names at most this number of queues. At most this number of providers have their own rows.
MOST_NAMES: Final = 5


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The numbers of one queue.

    Attributes:
        name: name of the queue in Celery.
        sqs_name: name of the queue on SQS, as in metrics and log lines.
        ready: number of messages that a worker could receive now.
        in_flight: number of hidden messages. They are running, wait for a retry, or wait in a
            worker for their start.
        delayed: number of new messages that SQS delays (``DelaySeconds``).
        has_dlq: whether the queue has a dead-letter queue. ``True`` if the queue was not read.
        dead_letters: number of messages in the dead-letter queue; ``None`` = not known, or the
            queue has no dead-letter queue.
        failure: SQS's error code if the queue could not be read.
        known: sums of the workers' numbers for the queue; ``None`` = messages are ready or in
            flight, and no worker has published numbers.
        at: when the workers' records were read, in seconds since the epoch.
    """

    name: str
    sqs_name: str = ""
    ready: int | None = None
    in_flight: int | None = None
    delayed: int | None = None
    has_dlq: bool = True
    dead_letters: int | None = None
    failure: str | None = None
    known: QueueNow | None = None
    at: float = 0.0

    @property
    def unaccounted(self) -> int:
        """Number of messages in flight that are missing in the workers' reports.

        Such messages were hidden after a worker's last report, or by a worker that has ended. A
        small number is normal, so the result is 0 unless the number is above both 20 and the number
        of messages in the reports. It is also 0 if no worker has published numbers.
        """
        known = self.known or QueueNow()
        accounted = known.waiting + known.running + known.held
        others = (self.in_flight or 0) - accounted
        return others if self.known and others > max(_FEW, accounted) else 0

    @property
    def running(self) -> int | None:
        """Number of tasks that workers are running."""
        return None if self.known is None else self.known.running

    @property
    def waiting(self) -> int | None:
        """Number of hidden messages that wait for their next attempt or their ETA."""
        return None if self.known is None or self.unaccounted else self.known.waiting

    @property
    def in_flight_share(self) -> float | None:
        """Share of SQS's quota of messages in flight that the queue uses, 0 to 1."""
        return None if self.in_flight is None else self.in_flight / MAX_IN_FLIGHT_MESSAGES

    @property
    def oldest_seconds(self) -> float | None:
        """Age in seconds of the oldest message that workers run, hold or have hidden."""
        if self.known is None or self.known.oldest_sent_at is None or self.unaccounted:
            return None
        return max(0.0, self.at - self.known.oldest_sent_at)


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of an app's queues, providers and workers at one time.

    Attributes:
        queues: the queues to show.
        providers: sums over all workers, for each provider and tenant.
        workers: number of workers with a record; ``None`` = the records could not be read.
        why: reason why the records could not be read.
        others: SQS names of queues that are not shown, although workers receive from them.
    """

    queues: Sequence[QueueStatus]
    providers: Sequence[ProviderNow] = ()
    workers: int | None = None
    why: str = ""
    others: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the values that ``sqs-status --json`` prints."""
        return {
            "queues": [{name: getattr(one, name) for name in _PUBLISHED} for one in self.queues],
            "providers": [asdict(one) for one in self.providers],
        }

    def not_shown(self) -> str | None:
        """Return a line about queues that are not shown, or ``None`` if all are shown."""
        if not self.others:
            return None
        others = name_some(self.others, MOST_NAMES)
        return f"not shown: workers also receive from {others}; name queues with -Q"


def read_status(name: str, url: str, calls_of: Callable[[str], Calls]) -> QueueStatus:
    """Read a queue's numbers from SQS, with one call for it and one for its dead-letter queue.

    Args:
        name: name of the queue in Celery.
        url: URL of the queue on SQS.
        calls_of: returns the object that makes SQS calls on the queue with a given URL.
    """
    found = calls_of(url).attributes()
    if isinstance(found, Failure):
        return QueueStatus(name=name, sqs_name=queue_name(url), failure=found.code)
    queue, dead_letters = describe_queue(url, found), None
    if queue.dlq_url is not None:
        dead = calls_of(queue.dlq_url).attributes()
        dead_letters = None if isinstance(dead, Failure) else sum(count_messages(dead))
    ready, in_flight, delayed = count_messages(found)
    return QueueStatus(
        name=name,
        sqs_name=queue.name,
        ready=ready,
        in_flight=in_flight,
        delayed=delayed,
        has_dlq=queue.dlq_url is not None,
        dead_letters=dead_letters,
        known=None if ready or in_flight else QueueNow(),
    )


def with_workers(status: QueueStatus, workers: Iterable[WorkerNow], *, now: float) -> QueueStatus:
    """Return a queue's status with the sums of the workers' numbers for the queue.

    The status is unchanged if the queue could not be read, or no worker has numbers for it.

    Args:
        status: the numbers from SQS.
        workers: the workers' records of the last minute.
        now: seconds since the epoch.
    """
    name = status.sqs_name
    found = [worker.queues[name] for worker in workers if name in worker.queues]
    if status.failure is not None or not found:
        return status
    known = QueueNow(
        running=sum(one.running for one in found),
        held=sum(one.held for one in found),
        waiting=sum(one.waiting for one in found),
        oldest_sent_at=find_first(one.oldest_sent_at for one in found),
        next_gives_up_at=find_first(one.next_gives_up_at for one in found),
        dead_letters=sum((Counter(one.dead_letters) for one in found), Counter()),
    )
    return replace(status, known=known, at=now)


def sum_providers(workers: Iterable[WorkerNow]) -> list[ProviderNow]:
    """Add up the workers' numbers for each provider and tenant. Take the worst of their states."""
    by_name: dict[str, list[ProviderNow]] = defaultdict(list)
    for worker in workers:
        for one in worker.providers:
            by_name[one.name].append(one)
    return [
        replace(
            min(group, key=lambda one: one.sort_key),
            rate=sum(one.rate for one in group),
            hidden=sum(one.hidden for one in group),
            in_line=sum(one.in_line for one in group),
        )
        for _, group in sorted(by_name.items())
    ]


_COLUMNS: Final = (
    *("queue", "ready", "waiting", "running", "in flight", "quota", "delayed", "dead", "oldest"),
)
_PROVIDER_COLUMNS: Final = ("provider", "state", "calls/s", "hidden", "in line")


def render(status: Status) -> str:
    """Return a table of all queues, a table of the providers that are not ok, and remarks."""
    lines = _table(_COLUMNS, map(_cells, status.queues))
    unwell = [one for one in status.providers if one.state != "ok"]
    unwell.sort(key=lambda one: one.sort_key)
    if unwell:
        lines += ["", *_table(_PROVIDER_COLUMNS, map(_provider_cells, unwell[:MOST_NAMES]))]
    if more := unwell[MOST_NAMES:]:
        waiting = sum(one.hidden + one.in_line for one in more)
        lines.append(f"{len(more)} more providers are not ok: {waiting} messages wait for them")
    return "\n".join([*lines, *_notes(status)])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the first column aligned left and the rest right."""
    rows = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _provider_cells(one: ProviderNow) -> tuple[str, ...]:
    rate = f"{one.rate:.1f}" if one.state == "recovering" else "-"
    return one.name, one.state, rate, str(one.hidden), str(one.in_line)


def _cells(queue: QueueStatus) -> tuple[str, ...]:
    share, age = queue.in_flight_share, queue.oldest_seconds
    dead = _number(queue.dead_letters) if queue.has_dlq else "-"
    return (
        queue.name,
        *map(_number, (queue.ready, queue.waiting, queue.running, queue.in_flight)),
        "?" if share is None else f"{share:.1%}",
        _number(queue.delayed),
        dead,
        in_words(age) if age is not None else "-" if queue.in_flight == 0 else "?",
    )


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _notes(status: Status) -> Iterator[str]:
    readable = [queue for queue in status.queues if not queue.failure]
    if unread := [q.name for q in readable if q.has_dlq and q.dead_letters is None]:
        yield f"{name_some(unread, MOST_NAMES)}: dead-letter queue cannot be read"
    if not_shown := status.not_shown():
        yield not_shown
    if status.workers is None:
        yield f"? means not known: {status.why}"
        return
    if unknown := [queue.name for queue in readable if queue.known is None]:
        of = f" of {name_some(unknown, MOST_NAMES)}" if status.workers else ""
        yield f"? means not known: no worker{of} has reported within the last minute"
    for queue in status.queues:
        yield from (f"{queue.name}: {line}" for line in _outlook(queue))


def _outlook(queue: QueueStatus) -> Iterator[str]:
    if queue.unaccounted:
        yield (
            f"{queue.unaccounted} messages in flight are in no worker's last report: hidden within"
            " the last 10 seconds, or before a deploy or a crash"
        )
    if queue.known is None:
        return
    if (first_at := queue.known.next_gives_up_at) is not None:
        yield f"the first waiting message gives up in {in_words(max(0.0, first_at - queue.at))}"
    if queue.known.dead_letters:
        reasons = sorted(queue.known.dead_letters.items(), key=lambda pair: -pair[1])
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons)
        yield f"given up by the workers since they started: {listed}"
