"""When may the next call to a provider begin, so that an agreed rate holds? GCRA with reservations.

A slot comes every ``1 / rate`` seconds. GCRA (generic cell rate algorithm, ITU-T I.371, annex A)
needs one number for that, the time of the next free slot. A message gets a slot if that is near,
and waits for it in its worker. Else it is hidden, and gets a place in a second line of the same
kind: the times at which hidden messages return, just as far apart as slots. So they return one by
one, when slots are near again, whichever worker receives them; and a message that has returned may
take a slot that is too far for a new one. No slot is held for a message that is not there: SQS may
show it late, or to another worker.

Two numbers, :class:`Times`, are the whole state. Where a fleet shares them they are in the store;
``provider.fleet`` has the same arithmetic for Redis. Pure: times are passed in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

__all__ = ["HEADROOM", "Departure", "Line", "Place", "Times", "assign", "longest_wait"]

#: Slots are handed out at this share of the agreed rate: a call that starts a few milliseconds
#: after its slot must not make a second fuller than agreed.
HEADROOM = 0.95

#: How far away a slot may be: for a message that is new; for one that was received before; for one
#: of a queue that brings nothing else, so that receiving more would be of no use.
NEW_SECONDS = 2.0
RETURNED_SECONDS = 10.0
ALONE_SECONDS = 60.0

#: Hidden messages return a little less often than slots come: what they leave is for those that
#: return late, and for new messages.
RETURN_SHARE = 0.97

#: A slot that was missed by more is lost, even for a message that was there: the worker stood
#: still.
LATEST_SECONDS = 0.1

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Times:
    """When the next slot is free, and when the next hidden message returns. Seconds."""

    free_at: float = 0.0
    back_at: float = 0.0

    def is_ahead(self, now: float) -> bool:
        """Return whether either is still to come."""
        return max(self.free_at, self.back_at) > now


@dataclass(frozen=True, slots=True)
class Place:
    """What a message was given.

    Attributes:
        at: its slot, or when it returns.
        is_slot: which of the two.
    """

    at: float
    is_slot: bool


def longest_wait(*, is_returned: bool, is_alone: bool, must_stay: bool) -> float:
    """Return how many seconds a message may wait in its worker for a slot.

    Args:
        is_returned: it was received before.
        is_alone: its queue brings only messages of its provider.
        must_stay: it must not be hidden.
    """
    if must_stay:
        return math.inf
    if is_alone:
        return ALONE_SECONDS
    return RETURNED_SECONDS if is_returned else NEW_SECONDS


def assign(
    times: Times, now: float, longest: Iterable[float], *, rate: float
) -> tuple[list[Place], Times]:
    """Give each message a slot, or a time to return.

    Args:
        times: as returned last time.
        now: seconds of the same clock.
        longest: how long each message may wait, in their order.
        rate: slots a second, above 0.
    """
    places, free_at, back_at = [], times.free_at, times.back_at
    for seconds in longest:
        slot = max(free_at, now)
        if slot - now <= seconds:
            places.append(Place(slot, is_slot=True))
            free_at = slot + 1 / rate
        else:
            back = max(back_at, slot)
            places.append(Place(back, is_slot=False))
            back_at = back + 1 / (rate * RETURN_SHARE)
    return places, Times(free_at, back_at)


@dataclass(slots=True)
class Departure(Generic[K]):
    """What becomes of messages that waited: some start at a slot, some are hidden until a time."""

    start: list[tuple[K, float]] = field(default_factory=list)
    hide: list[tuple[K, float]] = field(default_factory=list)


class Line(Generic[K]):
    """The messages of one provider that wait in a worker. Not safe for threads by itself."""

    def __init__(self) -> None:
        self._new: deque[tuple[K, float]] = deque()
        self._hide: list[tuple[K, float]] = []
        self._here: list[tuple[float, int, K, float]] = []
        self._without_process: deque[tuple[K, float]] = deque()
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._new) + len(self._here) + len(self._hide) + len(self._without_process)

    @property
    def missing(self) -> list[float]:
        """How long each message without a place may wait."""
        return [longest for _, longest in self._new]

    @property
    def is_missing(self) -> bool:
        """Whether a message has no place."""
        return bool(self._new)

    def join(self, key: K, longest: float) -> None:
        """Add a message that may start but for its slot; ``longest`` as from `longest_wait`."""
        self._new.append((key, longest))

    def give(self, places: Iterable[Place]) -> None:
        """Give places to the messages without one, in their order; any beyond them are lost."""
        for place in places:
            if not self._new:
                return
            key, longest = self._new.popleft()
            if place.is_slot:
                heapq.heappush(self._here, (place.at, next(self._sequence), key, longest))
            else:
                self._hide.append((key, place.at))

    def take_back(self) -> None:
        """Take the slots of all messages back; they are as without a place."""
        for _, _, key, longest in sorted(self._here, reverse=True):
            self._new.appendleft((key, longest))
        self._here.clear()

    @property
    def lacks_process(self) -> bool:
        """Whether a message has missed its slot because no process was free."""
        return bool(self._without_process)

    def ask_again(self, most: int) -> None:
        """Let those that lacked a process have new slots, while fewer than ``most`` have one."""
        most -= len(self._here) + len(self._new)
        for _ in range(min(most, len(self._without_process))):
            self._new.append(self._without_process.popleft())

    def depart(self, now: float, most: float = math.inf) -> Departure[K]:
        """Take out the messages that start now, ``most`` at the most, and those that are hidden.

        The others lose their slots: later, all at once, they would be more calls than agreed.
        """
        leaving: Departure[K] = Departure(hide=self._hide)
        self._hide = []
        while self._here and self._here[0][0] <= now:
            slot, _, key, longest = heapq.heappop(self._here)
            if now - slot > LATEST_SECONDS and len(leaving.start) < most:
                self._new.append((key, longest))
                continue
            self._without_process.append((key, longest))
            if len(leaving.start) < most:  # the slot is for whoever has waited longest
                leaving.start.append((self._without_process.popleft()[0], slot))
        return leaving

    def next_at(self) -> float | None:
        """Return when ``depart`` is worth calling; ``None`` = not before a place is given."""
        return self._here[0][0] if self._here else None
