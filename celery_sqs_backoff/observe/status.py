"""The state of each queue in numbers. ``None`` means that the number is not known, never zero.

SQS counts messages that are ready, in flight and delayed. Only the workers know which messages in
flight run and which wait for a retry; with a store, they publish it (:mod:`.board`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ..sqs.calls import Calls
from ..sqs.errors import Failure
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from ..units import in_words
from .board import ProviderNow, WorkerNow

#: Fields of a queue that ``sqs-status --json`` prints.
_PUBLISHED: Final = (
    *("name", "ready", "waiting", "running", "delayed"),
    *("dead_letters", "oldest_seconds", "in_flight_share"),
)

#: SQS's counts are approximate, so a difference of so few messages means nothing.
_FEW: Final = 20

#: Queues that a line names, and providers with a row of their own.
_MOST_NAMES: Final = 5

#: SQS deletes a message soon if less than this time is left.
_SOON_SECONDS: Final = 24 * 3600.0

_STEM: Final = "ApproximateNumberOfMessages"


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """One queue.

    Attributes:
        name: in Celery.
        sqs_name: on SQS, as in metrics and log lines.
        ready: messages that a worker could receive now.
        waiting: hidden messages that wait for their next attempt or their ETA.
        running: tasks that workers are running.
        in_flight: ``waiting``, ``running`` and the messages that workers hold.
        in_flight_share: share, 0 to 1, of SQS's quota of messages in flight.
        delayed: new messages that SQS delays (``DelaySeconds``).
        has_dlq: whether it has a dead-letter queue, as far as is known.
        dead_letters: messages in the dead-letter queue; ``None`` also if there is none.
        retention_seconds: how long the queue keeps a message.
        failure: SQS's error code, if the queue could not be read.
        workers: how many workers have published what they know of it.
        unaccounted: messages in flight that no worker knows, if they are the most; then ``waiting``
            is not known.
        oldest_seconds: age of the oldest message that is not done.
        giving_up: waiting messages whose ``retry_for`` is over within two hours.
        next_gives_up_at: when the first of them gives up, in seconds since the epoch.
        given_up: messages that the running workers have given up, by reason.
    """

    name: str
    sqs_name: str = ""
    ready: int | None = None
    waiting: int | None = None
    running: int | None = None
    in_flight: int | None = None
    in_flight_share: float | None = None
    delayed: int | None = None
    has_dlq: bool = True
    dead_letters: int | None = None
    retention_seconds: int | None = None
    failure: str | None = None
    workers: int = 0
    unaccounted: int = 0
    oldest_seconds: float | None = None
    giving_up: int = 0
    next_gives_up_at: float | None = None
    given_up: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on the queue, as far as SQS knows."""
        return self.ready == self.in_flight == self.delayed == 0

    @property
    def deleted_in_seconds(self) -> float | None:
        """Seconds until SQS deletes the oldest message, because its retention period is over."""
        if self.oldest_seconds is None or self.retention_seconds is None:
            return None
        return self.retention_seconds - self.oldest_seconds


@dataclass(frozen=True, kw_only=True)
class Status:
    """One look.

    Attributes:
        queues: that are shown.
        providers: of all workers.
        at: when, in seconds since the epoch.
        workers: how many have published; ``None``: that could not be read.
        why: the reason why it could not be read.
        others: queues that workers receive from and that are not shown, by their names on SQS.
    """

    queues: Sequence[QueueStatus]
    providers: Sequence[ProviderNow] = ()
    at: float = 0.0
    workers: int | None = None
    why: str = ""
    others: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what ``sqs-status --json`` prints."""
        return {
            "queues": [{name: getattr(one, name) for name in _PUBLISHED} for one in self.queues],
            "providers": [asdict(one) for one in self.providers],
        }

    def not_shown(self) -> str | None:
        """Return a line about the queues that are not shown, if there are any."""
        if not self.others:
            return None
        return f"not shown: workers also receive from {_name(self.others)}; name queues with -Q"


def read_status(name: str, url: str, calls_of: Callable[[str], Calls]) -> QueueStatus:
    """Read a queue's numbers from SQS, with one call for it and one for its dead-letter queue.

    Args:
        name: of the queue in Celery.
        url: of the queue on SQS.
        calls_of: from a queue's URL to its port.
    """
    sqs_name = url.rpartition("/")[2]
    found = calls_of(url).attributes()
    if isinstance(found, Failure):
        return QueueStatus(name=name, sqs_name=sqs_name, failure=found.code)
    in_flight = _integer(found, _STEM + "NotVisible")
    known = 0 if in_flight == 0 else None  # with nothing in flight, SQS tells both numbers
    dlq_url = _dlq_url(url, found)
    return QueueStatus(
        name=name,
        sqs_name=sqs_name,
        ready=_integer(found, _STEM),
        waiting=known,
        running=known,
        in_flight=in_flight,
        in_flight_share=None if in_flight is None else in_flight / MAX_IN_FLIGHT_MESSAGES,
        delayed=_integer(found, _STEM + "Delayed"),
        has_dlq=dlq_url is not None,
        dead_letters=None if dlq_url is None else _messages(calls_of(dlq_url)),
        retention_seconds=_integer(found, "MessageRetentionPeriod"),
    )


def with_workers(status: QueueStatus, workers: Iterable[WorkerNow], *, now: float) -> QueueStatus:
    """Add what the workers know of a queue; without any worker nothing is added.

    Messages that a worker hid before it ended are in flight and in none of the workers' numbers.
    While they are the most, how many messages wait, and how old they are, is not known.

    Args:
        status: what SQS has told.
        workers: their records of the last minute.
        now: seconds since the epoch.
    """
    known = [
        worker.queues[status.sqs_name] for worker in workers if status.sqs_name in worker.queues
    ]
    if status.failure is not None or not known:
        return status
    accounted = sum(queue.waiting + queue.running + queue.held for queue in known)
    unaccounted = max(0, (status.in_flight or 0) - accounted)
    is_mostly_unknown = unaccounted > max(_FEW, accounted)
    oldest = None if is_mostly_unknown else _first(queue.oldest_sent_at for queue in known)
    given_up: Counter[str] = Counter()
    for queue in known:
        given_up.update(queue.dead_letters)
    return replace(
        status,
        waiting=None if is_mostly_unknown else sum(queue.waiting for queue in known),
        running=sum(queue.running for queue in known),
        unaccounted=unaccounted if is_mostly_unknown else 0,
        workers=len(known),
        oldest_seconds=None if oldest is None else max(0.0, now - oldest),
        giving_up=sum(queue.giving_up for queue in known),
        next_gives_up_at=_first(queue.next_gives_up_at for queue in known),
        given_up=dict(given_up),
    )


def sum_providers(workers: Iterable[WorkerNow]) -> list[ProviderNow]:
    """Add up what the workers know of each provider and tenant. The worst state counts."""
    found: dict[str, ProviderNow] = {}
    for one in (provider for worker in workers for provider in worker.providers):
        known = found.setdefault(one.name, replace(one, rate=0.0, hidden=0, in_line=0))
        found[one.name] = replace(
            known,
            state=min(known, one, key=lambda one: one.badness).state,
            rate=known.rate + one.rate,
            hidden=known.hidden + one.hidden,
            in_line=known.in_line + one.in_line,
        )
    return [found[name] for name in sorted(found)]


_COLUMNS: Final = (
    *("queue", "ready", "waiting", "running", "in flight", "quota", "delayed", "dead", "oldest"),
)
_PROVIDER_COLUMNS: Final = ("provider", "state", "calls/s", "hidden", "in line")


def render(status: Status) -> str:
    """Return a table of all queues, one of the providers that are not ok, and remarks."""
    lines = _table(_COLUMNS, map(_cells, status.queues))
    unwell = [one for one in status.providers if one.state != "ok"]
    unwell.sort(key=lambda one: -one.hidden - one.in_line)
    if unwell:
        lines += ["", *_table(_PROVIDER_COLUMNS, map(_provider_cells, unwell[:_MOST_NAMES]))]
    if more := unwell[_MOST_NAMES:]:
        waiting = sum(one.hidden + one.in_line for one in more)
        lines.append(f"{len(more)} more are paused or recovering: {waiting} messages wait for them")
    return "\n".join([*lines, *_notes(status)])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align the first column to the left and the others to the right."""
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
        in_words(age) if age is not None else "-" if queue.is_empty else "?",
    )


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _notes(status: Status) -> Iterator[str]:
    faults: dict[str, list[str]] = {}
    for queue in status.queues:
        if queue.failure:
            faults.setdefault(queue.failure, []).append(queue.name)
        elif queue.has_dlq and queue.dead_letters is None:
            faults.setdefault("dead-letter queue cannot be read", []).append(queue.name)
    yield from (f"{_name(names)}: {fault}" for fault, names in faults.items())
    if not_shown := status.not_shown():
        yield not_shown
    if status.workers is None:
        yield f"? is not known: {status.why}"
        return
    unknown = [q.name for q in status.queues if not (q.workers or q.is_empty or q.failure)]
    if unknown:
        of = f" of {_name(unknown)}" if status.workers else ""
        yield f"? is not known: no worker{of} has written within the last minute"
    for queue in status.queues:
        yield from (f"{queue.name}: {line}" for line in _outlook(queue, status.at))


def _outlook(queue: QueueStatus, now: float) -> Iterator[str]:
    if queue.unaccounted:
        yield (
            f"{queue.unaccounted} messages in flight are known to no worker that runs: hidden"
            " before a deploy or a crash"
        )
    if queue.giving_up and queue.next_gives_up_at is not None:
        first = in_words(max(0.0, queue.next_gives_up_at - now))
        messages = f"{queue.giving_up} message{'' if queue.giving_up == 1 else 's'}"
        yield f"next: {messages} give up within 2 hours, the first in {first}"
    if queue.deleted_in_seconds is not None and queue.deleted_in_seconds < _SOON_SECONDS:
        yield f"SQS deletes the oldest message in {in_words(max(0.0, queue.deleted_in_seconds))}"
    if queue.given_up:
        reasons = sorted(queue.given_up.items(), key=lambda pair: -pair[1])
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons)
        yield f"given up by the workers since they started: {listed}"


def _name(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _first(times: Iterable[float | None]) -> float | None:
    return min((at for at in times if at is not None), default=None)


def _messages(calls: Calls) -> int | None:
    found = calls.attributes()
    if isinstance(found, Failure):
        return None
    return sum(_integer(found, _STEM + kind) or 0 for kind in ("", "NotVisible", "Delayed"))


def _dlq_url(url: str, attributes: Mapping[str, str]) -> str | None:
    """Return the URL of the dead-letter queue, which is in the same account and Region."""
    try:
        arn = json.loads(attributes["RedrivePolicy"])["deadLetterTargetArn"]
    except (KeyError, TypeError, ValueError):
        return None
    return f"{url.rpartition('/')[0]}/{str(arn).rpartition(':')[2]}"


def _integer(attributes: Mapping[str, str], name: str) -> int | None:
    try:
        return int(attributes[name])
    except (KeyError, ValueError):
        return None
