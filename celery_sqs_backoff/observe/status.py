"""The state of each queue in numbers. ``None`` means that nobody knows, never zero.

SQS counts messages that are ready, in flight and delayed. Which of those in flight are running and
which wait for a retry, only the workers know; with a store, they say so (:mod:`.board`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from ..sqs.calls import Calls
from ..sqs.errors import Failure
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from .board import ProviderNow, QueueNow, WorkerNow

__all__ = ["ProviderStatus", "QueueStatus", "provider_status", "read_status", "with_workers"]

_PUBLISHED = frozenset(
    {
        *("name", "ready", "waiting", "running", "delayed"),
        *("dead_letters", "oldest_seconds", "in_flight_share"),
    }
)

#: Fewer messages in flight of which no worker knows may be on their way: counts are approximate.
_FEW: Final = 20

_STEM = "ApproximateNumberOfMessages"


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """One queue.

    Attributes:
        name: as in Celery.
        ready: messages that a worker could receive now.
        waiting: hidden messages that wait for their next attempt or their ETA.
        running: tasks that workers are running.
        delayed: new messages that SQS delays (``DelaySeconds``).
        dead_letters: messages in the dead-letter queue; ``None`` also if there is none.
        oldest_seconds: age of the oldest message that is not done.
        in_flight_share: share, 0 to 1, of SQS's quota of messages in flight.
    """

    name: str
    ready: int | None = None
    waiting: int | None = None
    running: int | None = None
    delayed: int | None = None
    dead_letters: int | None = None
    oldest_seconds: float | None = None
    in_flight_share: float | None = None
    #: Messages in flight: ``waiting`` and ``running`` together.
    in_flight: int | None = None
    #: How many of those no worker knows, if they are the most: then ``waiting`` is not known.
    unaccounted: int = 0
    #: Whether it has a dead-letter queue, as far as is known.
    has_dlq: bool = True
    #: How many workers have written what they know of it.
    workers: int = 0
    #: Seconds until SQS deletes the oldest message, because its retention period is over.
    deleted_in_seconds: float | None = None
    #: The queue's name on SQS, as in metrics and log lines.
    sqs_name: str = ""
    #: Of the queue.
    retention_seconds: int | None = None
    #: Waiting messages whose ``retry_for`` is over within two hours, and when the first one's is.
    giving_up: int | None = None
    next_gives_up_at: float | None = None
    #: What the workers that run now have given up, by reason.
    given_up: Mapping[str, int] = field(default_factory=dict)
    #: SQS's error code, if the queue could not be read.
    failure: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on the queue, as far as SQS knows."""
        return self.ready == self.in_flight == self.delayed == 0

    @property
    def has_nothing(self) -> bool:
        """Whether there is no message to show, of it or of its dead-letter queue."""
        return self.failure is not None or (self.is_empty and not self.dead_letters)

    def as_dict(self) -> dict[str, object]:
        """Return what ``sqs-status --json`` prints of it."""
        return {name: value for name, value in asdict(self).items() if name in _PUBLISHED}


def read_status(name: str, url: str, calls_of: Callable[[str], Calls]) -> QueueStatus:
    """Read a queue's numbers from SQS: two calls, or one if it has no dead-letter queue.

    Arguments:
        name: as in Celery.
        url: on SQS.
        calls_of: from a queue's URL to its port.
    """
    found = calls_of(url).attributes()
    if isinstance(found, Failure):
        return QueueStatus(name=name, sqs_name=url.rpartition("/")[2], failure=found.code)
    in_flight = _number(found, "NotVisible")
    dlq_url = _dlq_url(url, found)
    return QueueStatus(
        name=name,
        sqs_name=url.rpartition("/")[2],
        ready=_number(found, ""),
        # Nothing in flight is the one case in which SQS tells both.
        waiting=0 if in_flight == 0 else None,
        running=0 if in_flight == 0 else None,
        delayed=_number(found, "Delayed"),
        dead_letters=None if dlq_url is None else _messages(calls_of(dlq_url)),
        has_dlq=dlq_url is not None,
        in_flight=in_flight,
        in_flight_share=None if in_flight is None else in_flight / MAX_IN_FLIGHT_MESSAGES,
        retention_seconds=_integer(found, "MessageRetentionPeriod"),
    )


def with_workers(status: QueueStatus, workers: Iterable[WorkerNow], *, now: float) -> QueueStatus:
    """Add what the workers know of a queue; without any worker nothing is added.

    The sums are those of the workers that have written within the last minute. What a worker has
    hidden that is gone meanwhile is in flight, and in none of the sums. While that is most of what
    is in flight, how many wait, and how old they are, is not known.

    Args:
        status: what SQS has told.
        workers: their records.
        now: seconds since the epoch.
    """
    known = [
        queue for worker in workers if (queue := worker.queues.get(status.sqs_name)) is not None
    ]
    if status.failure is not None or not known:
        return status
    accounted = sum(queue.waiting + queue.running + queue.held for queue in known)
    unaccounted = max(0, (status.in_flight or 0) - accounted)
    is_mostly_unknown = unaccounted > max(_FEW, accounted)
    oldest = None if is_mostly_unknown else _first(queue.oldest_sent_at for queue in known)
    age = None if oldest is None else max(0.0, now - oldest)
    kept = status.retention_seconds
    return replace(
        status,
        waiting=None if is_mostly_unknown else sum(queue.waiting for queue in known),
        running=sum(queue.running for queue in known),
        unaccounted=unaccounted if is_mostly_unknown else 0,
        workers=len(known),
        oldest_seconds=age,
        deleted_in_seconds=None if age is None or kept is None else kept - age,
        giving_up=sum(queue.giving_up for queue in known),
        next_gives_up_at=_first(queue.next_gives_up_at for queue in known),
        given_up=_added(known),
    )


def _added(known: Iterable[QueueNow]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for queue in known:
        found.update(queue.dead_letters)
    return dict(found)


def _first(times: Iterable[float | None]) -> float | None:
    return min((at for at in times if at is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class ProviderStatus:
    """One provider, over all workers.

    Attributes:
        name: of the provider.
        state: the worst of the workers' states: ``"open"``, ``"probing"`` or ``"closed"``.
        waiting: messages that workers could bring forward.
        workers: how many have a gate for it.
    """

    name: str
    state: str
    waiting: int
    workers: int


def provider_status(workers: Iterable[WorkerNow]) -> list[ProviderStatus]:
    """Add up what the workers know of providers."""
    found: dict[str, list[ProviderNow]] = {}
    for worker in workers:
        for provider in worker.providers:
            found.setdefault(provider.name, []).append(provider)
    return [
        ProviderStatus(
            name=name,
            state=min(known, key=lambda one: one.badness).state,
            waiting=sum(one.waiting for one in known),
            workers=len(known),
        )
        for name, known in sorted(found.items())
    ]


def _messages(calls: Calls) -> int | None:
    found = calls.attributes()
    if isinstance(found, Failure):
        return None
    return sum(_number(found, kind) or 0 for kind in ("", "NotVisible", "Delayed"))


def _dlq_url(url: str, attributes: Mapping[str, str]) -> str | None:
    """SQS wants the dead-letter queue in the same account and Region: only the name differs."""
    try:
        arn = json.loads(attributes["RedrivePolicy"])["deadLetterTargetArn"]
    except (KeyError, TypeError, ValueError):
        return None
    return f"{url.rpartition('/')[0]}/{str(arn).rpartition(':')[2]}"


def _number(attributes: Mapping[str, str], kind: str) -> int | None:
    return _integer(attributes, _STEM + kind)


def _integer(attributes: Mapping[str, str], name: str) -> int | None:
    try:
        return int(attributes[name])
    except (KeyError, ValueError):
        return None
