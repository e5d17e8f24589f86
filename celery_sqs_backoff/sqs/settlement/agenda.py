"""When something is to be done about which row of a table: pure, in O(log n) per change."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

#: Cancelled entries are dropped in one sweep when they are more than those that count.
_SWEEP_ABOVE = 64


class Agenda(Generic[_Item]):
    """Items by the time at which they are ready, taken in batches.

    A batch is due when it is full, or when its first item has been ready for ``linger`` seconds.

    Arguments:
        batch_size: most items of one batch.
    """

    __slots__ = ("_batch_size", "_count", "_later", "_live", "_ready")

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._count = itertools.count(1)
        self._later: list[tuple[float, int, _Item]] = []
        self._ready: deque[tuple[float, int, _Item]] = deque()
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, item: _Item, at: float, now: float) -> int:
        """Note an item that is ready at a time; return its ticket, by which it is cancelled."""
        ticket = next(self._count)
        self._live.add(ticket)
        if at <= now:
            self._ready.append((at, ticket, item))
        else:
            heapq.heappush(self._later, (at, ticket, item))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Forget an item. A ticket that is not valid any more does nothing."""
        self._live.discard(ticket)
        if len(self._later) + len(self._ready) > 2 * len(self._live) + _SWEEP_ABOVE:
            self._later = [entry for entry in self._later if entry[1] in self._live]
            heapq.heapify(self._later)
            self._ready = deque(entry for entry in self._ready if entry[1] in self._live)

    def due_at(self, now: float, linger: float) -> float:
        """Return when the next batch is due; infinity if there is nothing."""
        self._promote(now)
        if len(self._ready) >= self._batch_size:
            return now
        if self._ready:
            return self._ready[0][0] + linger
        return self._later[0][0] + linger if self._later else math.inf

    def ready(self, now: float, at_most: int) -> list[_Item]:
        """Return the items that ``take`` would return, and leave them where they are."""
        self._promote(now)
        live = (item for _, ticket, item in self._ready if ticket in self._live)
        return list(itertools.islice(live, at_most))

    def take(self, now: float, at_most: int, slack: float = 0.0) -> list[_Item]:
        """Remove and return the items that are ready, the oldest first.

        Arguments:
            at_most: most items.
            slack: seconds by which an item may be early.
        """
        items = []
        for ticket, item in itertools.islice(self._pop(now, now + slack), at_most):
            self._live.discard(ticket)
            items.append(item)
        return items

    def _pop(self, now: float, until: float) -> Iterator[tuple[int, _Item]]:
        """What is early is left where it is, unless it is taken: the rest must not wait for it."""
        self._promote(now)
        while self._ready or (self._later and self._later[0][0] <= until):
            entry = self._ready.popleft() if self._ready else heapq.heappop(self._later)
            if entry[1] in self._live:
                yield entry[1:]

    def _promote(self, now: float) -> None:
        while self._ready and self._ready[0][1] not in self._live:
            self._ready.popleft()
        while self._later and (self._later[0][0] <= now or self._later[0][1] not in self._live):
            entry = heapq.heappop(self._later)
            if entry[1] in self._live:
                self._ready.append(entry)
