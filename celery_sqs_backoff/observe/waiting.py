"""Keep track of the messages that this worker has hidden or given up, from its events.

SQS does not tell how many messages are hidden, because it counts hidden and running messages
together, as "in flight".
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from .board import QueueNow, find_first
from .events import DeadLettered, MessageHidden, Polled, Recalled, SettlementFailed, WorkerEvent

#: Seconds between two removals of messages that are due.
_PRUNE_SECONDS: Final = 60.0


class Waiting:
    """The waiting messages of each queue, kept up to date by events. Thread-safe.

    A waiting message is hidden by this worker until a later attempt. It stops waiting when SQS
    shows it again, at its time or earlier at the worker's request. It also stops when the worker
    receives it or gives it up, or when the call to hide it has failed. Each waiting message takes
    about 300 bytes, and SQS allows 120,000 messages in flight per queue.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: By queue and message ID: when the message is due, and the event that hid it.
        self._entries: dict[str, dict[str, tuple[float, MessageHidden]]] = defaultdict(dict)
        self._pruned_at = clock()
        self._dead_letters: dict[str, Counter[str]] = defaultdict(Counter)

    def __call__(self, event: WorkerEvent) -> None:
        """Update the waiting messages. :class:`.events.Events` calls this with each event."""
        if isinstance(event, MessageHidden):
            with self._lock:
                if (now := self._clock()) >= self._pruned_at + _PRUNE_SECONDS:
                    self._prune(now)
                self._entries[event.queue][event.message_id] = now + event.seconds, event
        elif isinstance(event, Polled | Recalled):
            if event.queue in self._entries:
                with self._lock:
                    for message_id in event.message_ids:
                        self._entries[event.queue].pop(message_id, None)
        elif isinstance(event, DeadLettered | SettlementFailed):
            with self._lock:
                self._entries[event.queue].pop(event.message_id, None)
                if isinstance(event, DeadLettered):
                    self._dead_letters[event.queue][event.reason] += 1

    def _prune(self, now: float) -> None:
        """Remove the messages that are due."""
        self._pruned_at = now
        for entries in self._entries.values():
            for message_id in [name for name, (due, _) in entries.items() if due <= now]:
                del entries[message_id]

    def queues(self) -> set[str]:
        """Return the names of the queues in which this worker has hidden or given up messages."""
        with self._lock:
            return {*self._entries, *self._dead_letters}

    def now(self, queue: str) -> QueueNow:
        """Count the hidden messages and dead letters of a queue, and find the oldest message."""
        with self._lock:
            now = self._clock()
            hidden = [event for due, event in self._entries[queue].values() if due > now]
            dead_letters = dict(self._dead_letters[queue])
        sent = [(one.sent_at, one.eta or 0.0) for one in hidden if one.sent_at is not None]
        return QueueNow(
            waiting=len(hidden),
            oldest_sent_at=find_first(sent_at for sent_at, _ in sent),
            oldest_due_at=find_first(max(pair) for pair in sent),
            next_gives_up_at=find_first(one.gives_up_at for one in hidden),
            dead_letters=dead_letters,
        )
