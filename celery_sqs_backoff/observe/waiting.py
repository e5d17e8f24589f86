"""The messages that this worker has hidden or given up, as a fold over its events.

SQS counts hidden and running messages as one number, "in flight".
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from .board import QueueNow
from .events import DeadLettered, Event, Hidden, Polled, Recalled, SettlementFailed

#: How far ahead "gives up soon" looks.
_SOON_SECONDS: Final = 2 * 3600.0

#: A message gives up soon only if at most this share of its ``retry_for`` is left.
_LAST_SHARE: Final = 0.25

#: Most messages of one queue, because SQS does not allow more in flight.
_MOST: Final = 120_000

#: With this many messages, due ones are dropped.
_FIRST_PRUNE: Final = 1_000


class _Entry(NamedTuple):
    due: float
    hidden: Hidden


class Waiting:
    """Folds events into the messages that wait, by queue. Safe in any thread.

    A message stops waiting when it is due, when it is recalled or this worker receives it, when it
    is given up, or when SQS has not hidden it in time.
    Memory: about 300 bytes per waiting message, of which SQS allows 120,000 per queue.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, _Entry]] = defaultdict(dict)
        self._prune_at: dict[str, int] = defaultdict(lambda: _FIRST_PRUNE)
        self._dead_letters: dict[str, Counter[str]] = defaultdict(Counter)

    def __call__(self, event: Event) -> None:
        """Enter an event. This is a listener of :class:`.stream.Events`."""
        if isinstance(event, Hidden):
            with self._lock:
                self._hide(event)
        elif isinstance(event, Polled | Recalled):
            if entries := self._entries.get(event.queue):
                with self._lock:
                    for message_id in event.message_ids:
                        entries.pop(message_id, None)
        elif isinstance(event, DeadLettered | SettlementFailed):
            with self._lock:
                self._entries[event.queue].pop(event.message_id, None)
                if isinstance(event, DeadLettered):
                    self._dead_letters[event.queue][event.reason] += 1

    def _hide(self, event: Hidden) -> None:
        entries = self._entries[event.queue]
        if len(entries) >= min(_MOST, self._prune_at[event.queue]):
            # The next look is at twice as many, so the cost per message is constant.
            self._prune_at[event.queue] = max(_FIRST_PRUNE, 2 * self._prune(event.queue))
        if len(entries) < _MOST:
            entries[event.message_id] = _Entry(self._clock() + event.seconds, event)

    def _prune(self, queue: str) -> int:
        """Drop the messages that are due. Return how many are left."""
        entries, now = self._entries[queue], self._clock()
        for message_id in [name for name, entry in entries.items() if entry.due <= now]:
            del entries[message_id]
        return len(entries)

    def queues(self) -> set[str]:
        """Return the names of the queues of which something was hidden or given up."""
        with self._lock:
            return {*self._entries, *self._dead_letters}

    def now(self, queue: str, *, at: float) -> QueueNow:
        """Return the messages of a queue that wait or were given up, in numbers.

        Args:
            queue: its name.
            at: the time, in seconds since the epoch.
        """
        with self._lock:
            self._prune(queue)
            hidden = [entry.hidden for entry in self._entries[queue].values()]
            dead_letters = dict(self._dead_letters[queue])
        ends = [(one.gives_up_at, one.retry_for) for one in hidden if one.gives_up_at is not None]
        sent = [(one.sent_at, one.eta) for one in hidden if one.sent_at is not None]
        return QueueNow(
            waiting=len(hidden),
            oldest_sent_at=min((sent_at for sent_at, _ in sent), default=None),
            oldest_due_at=min((max(sent_at, eta or 0.0) for sent_at, eta in sent), default=None),
            giving_up=sum(_is_soon(end - at, retry_for) for end, retry_for in ends),
            next_gives_up_at=min((end for end, _ in ends), default=None),
            dead_letters=dead_letters,
        )


def _is_soon(seconds: float, retry_for: float | None) -> bool:
    is_last = retry_for is None or seconds <= _LAST_SHARE * retry_for
    return is_last and seconds <= _SOON_SECONDS
