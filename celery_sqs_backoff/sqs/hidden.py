"""The messages that a worker has hidden for one provider and may bring forward. No I/O.

A provider is a service that tasks call. A hold is the time for which SQS hides a message, until the
visibility timeout ends. To bring a message forward is to end its hold early. Only the settlement
table (``worker.settlement``) and the simulator add and drop messages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

#: For this many seconds before a hold ends, it is not certain that SQS still hides the message,
#: because clocks differ and calls take time. A message is brought forward only while its hold is
#: certain.
MARGIN_SECONDS = 5.0

#: The highest number of hidden messages that a worker remembers for one provider. Each message
#: takes about 1 KB.
MOST_HIDDEN = 20_000

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Recall:
    """The permission to bring a message forward. Times are seconds of the settlement table's clock.

    Attributes:
        among: the hidden messages of the message's provider.
        not_before: the time before which the message must not be brought forward.
        probe_from: the time from which the message may be a probe, which tests whether a provider
            that was down is up again.
        next_is_last: whether the next receive of the message is the last that its queue allows.
        receives: SQS's count of the message's receives so far.
    """

    among: Hidden[Any]
    not_before: float = 0.0
    probe_from: float = 0.0
    next_is_last: bool = False
    receives: int = 0


class Hidden(Generic[K]):
    """The hidden messages of one provider, ordered by the ends of their holds.

    Arguments:
        most: how many messages to keep at most. SQS shows the others at the end of their holds.
    """

    def __init__(self, most: int = MOST_HIDDEN) -> None:
        self._most = most
        self._kept: dict[K, tuple[float, int, Recall]] = {}
        #: Two heaps. ``_early`` has the messages that must not be brought forward yet, by
        #: ``not_before``. ``_furthest`` has the others, the latest end of hold first. An entry
        #: stays in its heap when its message is dropped or added again. It is then outdated. Each
        #: ``add`` has a new number, the ticket, which tells a new entry from an outdated entry.
        self._early: list[tuple[float, int, K]] = []
        self._furthest: list[tuple[float, int, K]] = []
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_room(self) -> bool:
        return len(self._kept) < self._most

    def add(self, message: K, until: float, recall: Recall, now: float) -> float | None:
        """Keep a message that SQS hides, and return when its hold is no longer certain.

        Return ``None`` if the message is not kept. Either there is no room, or the hold is not
        certain for long enough to bring the message forward.

        Arguments:
            until: the end of the hold.
            recall: the permission to bring the message forward.
            now: the time.
        """
        certain_until = until - MARGIN_SECONDS
        if not self.has_room or certain_until <= max(now, recall.not_before):
            return None
        ticket = next(self._tickets)
        self._kept[message] = certain_until, ticket, recall
        heapq.heappush(self._early, (recall.not_before, ticket, message))
        # Make the heaps again when more than half of their entries are outdated.
        if len(self._early) + len(self._furthest) > 2 * len(self._kept) + 64:
            self._early = [(each.not_before, n, key) for key, (_, n, each) in self._kept.items()]
            heapq.heapify(self._early)
            self._furthest = []
        return certain_until

    def discard(self, message: K) -> None:
        self._kept.pop(message, None)

    def furthest(self, most: int, now: float) -> list[K]:
        """Return up to ``most`` messages to bring forward, the latest end of hold first."""
        while self._early and self._early[0][0] <= now:
            _, ticket, message = heapq.heappop(self._early)
            heapq.heappush(self._furthest, (-self._until(message, ticket), ticket, message))
        found: list[tuple[float, int, K]] = []
        while self._furthest and len(found) < most:
            entry = heapq.heappop(self._furthest)
            if now < self._until(entry[2], entry[1]):
                found.append(entry)
        for entry in found:
            heapq.heappush(self._furthest, entry)
        return [message for _, _, message in found]

    def _until(self, message: K, ticket: int) -> float:
        """Return the time until which a hold is certain, or 0 for an outdated entry of a heap."""
        at, newest, _ = self._kept.get(message, (0.0, ticket, None))
        return at if newest == ticket else 0.0

    def to_probe_with(self, now: float) -> K | None:
        """Return the message to bring forward as a probe, or ``None`` if no message is ready.

        Prefer messages that have more than one receive left. Of these, choose the message with the
        fewest receives so far.
        """
        ready = [
            (recall.next_is_last, recall.receives, ticket, message)
            for message, (until, ticket, recall) in self._kept.items()
            if max(recall.probe_from, recall.not_before) <= now < until
        ]
        return min(ready)[-1] if ready else None

    def all(self) -> list[tuple[K, float, Recall]]:
        """Return each message with the end of its hold and its permission, the latest end first."""
        found = ((key, at + MARGIN_SECONDS, recall) for key, (at, _, recall) in self._kept.items())
        return sorted(found, key=lambda each: -each[1])
