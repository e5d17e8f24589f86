"""The messages that this worker has hidden and that are not due yet, as a fold over events.

SQS counts them and the running messages as one number, "in flight".
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from .events import DeadLettered, Event, Hidden, Recalled, Received, SettlementFailed

#: Of one queue: SQS allows no more in flight.
_MOST: Final = 120_000

#: Of ``retry_for``: what is left of it from where on it is nearly over.
_LAST_SHARE: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class WaitingNow:
    """The messages that wait on one queue at one moment.

    Attributes:
        messages: how many.
        oldest_sent_at: when the oldest of them was sent, in seconds since the epoch.
        oldest_due_at: the same, but a message with an ETA counts from its ETA.
        giving_up: how many have no time left for another attempt within ``horizon`` seconds.
        nearly_given_up: those of them with at most a quarter of their ``retry_for`` left.
        next_gives_up_at: when the first waiting message gives up.
    """

    messages: int = 0
    oldest_sent_at: float | None = None
    oldest_due_at: float | None = None
    giving_up: int = 0
    nearly_given_up: int = 0
    next_gives_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    due: float
    hidden: Hidden

    @property
    def due_at(self) -> float | None:
        """First time at which the task was due, in seconds since the epoch."""
        sent_at, eta = self.hidden.sent_at, self.hidden.eta
        return sent_at if sent_at is None or eta is None else max(sent_at, eta)

    def gives_up_by(self, at: float) -> bool:
        return self.hidden.gives_up_at is not None and self.hidden.gives_up_at <= at

    def is_nearly_over(self, at: float) -> bool:
        last = (self.hidden.retry_for or math.inf) * _LAST_SHARE
        return self.gives_up_by(at + last)


class Waiting:
    """Folds events into the messages that wait, by queue. Safe in any thread.

    A message stops waiting when it is due, when it is brought forward or this worker receives it,
    when it is given up, or when SQS has not hidden it in time.
    Memory: about 400 bytes per waiting message, of which SQS allows 120,000 per queue.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, _Entry]] = defaultdict(dict)
        self._due: dict[str, list[tuple[float, str]]] = defaultdict(list)

    def __call__(self, event: Event) -> None:
        """Enter an event: a listener of :class:`.stream.Events`."""
        if isinstance(event, Hidden):
            self._hidden(event)
        elif isinstance(event, Received | Recalled):
            if entries := self._entries.get(event.queue):
                with self._lock:
                    for message_id in event.message_ids:
                        entries.pop(message_id, None)
        elif isinstance(event, DeadLettered | SettlementFailed):
            with self._lock:
                self._entries[event.queue].pop(event.message_id, None)

    def _hidden(self, event: Hidden) -> None:
        due = self._clock() + event.seconds
        with self._lock:
            entries = self._entries[event.queue]
            if len(entries) >= _MOST:
                self._forget(event.queue)
            if len(entries) < _MOST:
                entries[event.message_id] = _Entry(due, event)
                heapq.heappush(self._due[event.queue], (due, event.message_id))
            self._forget(event.queue)

    def count(self, queue: str) -> int:
        """Return how many messages of a queue are not due yet."""
        with self._lock:
            self._forget(queue)
            return len(self._entries[queue])

    def queues(self) -> list[str]:
        """Return the names of the queues on which something has waited."""
        return list(self._entries)

    def now(self, queue: str, *, at: float, horizon: float) -> WaitingNow:
        """Return the messages that wait on a queue, in numbers.

        Args:
            queue: its name.
            at: the time, in seconds since the epoch.
            horizon: seconds from then on, for ``giving_up``.
        """
        with self._lock:
            self._forget(queue)
            entries = list(self._entries[queue].values())
        soon = [entry for entry in entries if entry.gives_up_by(at + horizon)]
        return WaitingNow(
            messages=len(entries),
            oldest_sent_at=_first(entry.hidden.sent_at for entry in entries),
            oldest_due_at=_first(entry.due_at for entry in entries),
            giving_up=len(soon),
            nearly_given_up=sum(entry.is_nearly_over(at) for entry in soon),
            next_gives_up_at=_first(entry.hidden.gives_up_at for entry in entries),
        )

    def _forget(self, queue: str) -> None:
        """Drop the messages that are due. Times of replaced entries are still in the heap."""
        due, entries, now = self._due[queue], self._entries[queue], self._clock()
        while due and due[0][0] <= now:
            at, message_id = heapq.heappop(due)
            entry = entries.get(message_id)
            if entry is not None and entry.due <= at:
                del entries[message_id]
        if len(due) > 2 * len(entries) + 1_000:  # mostly times of messages that were received
            due[:] = [(entry.due, message_id) for message_id, entry in entries.items()]
            heapq.heapify(due)


def _first(times: Iterable[float | None]) -> float | None:
    return min((at for at in times if at is not None), default=None)
