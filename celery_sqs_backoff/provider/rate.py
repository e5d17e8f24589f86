"""When may the next call to a provider begin?

The agreed rate is GCRA with reservations. :class:`RecoveryRate` follows the capacity of a provider
that recovers. A call begins when both allow it.

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
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from ..retry.decision import Reply

#: Slots are handed out at this share of the agreed rate, so that calls that start a few
#: milliseconds late do not make a second fuller than agreed.
HEADROOM = 0.95

#: How far away a slot may be: for a message that is new; for one that was received before.
NEW_SECONDS = 2.0
RETURNED_SECONDS = 10.0

#: Hidden messages return a little less often than slots come. The other slots are for messages that
#: return late, and for new ones.
RETURN_SHARE = 0.97

#: A slot that was missed by more is lost, even for a message that was there: the worker stood
#: still, or its processes did.
LATEST_SECONDS = 0.1

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Times:
    """When the next slot is free, and when the next hidden message returns. Seconds."""

    free_at: float = 0.0
    back_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """The place that a message was given.

    Attributes:
        at: its slot, or when it returns.
        is_slot: whether it is a slot.
    """

    at: float
    is_slot: bool


def longest_wait(*, is_returned: bool, must_stay: bool) -> float:
    """Return how many seconds a message may wait in its worker for a slot.

    Args:
        is_returned: it was received before.
        must_stay: it must not be hidden.
    """
    if must_stay:
        return math.inf
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
    """The decision about messages that waited.

    Attributes:
        start: the messages that start now, each with its slot.
        hide: the messages to hide, each with its time of return.
        missed: how many slots were lost.
    """

    start: list[tuple[K, float]] = field(default_factory=list)
    hide: list[tuple[K, float]] = field(default_factory=list)
    missed: int = 0


class Line(Generic[K]):
    """The messages of one provider that wait in a worker, and the slots that they have been given.

    Slots belong to the line, so a due slot is for the message that has waited longest. Not safe for
    threads.

    Args:
        is_over: whether a message is settled, and needs no slot.
        needs_slots: ``False`` = no rate is agreed, and a message starts at its turn.
    """

    def __init__(
        self, is_over: Callable[[K], bool] = lambda key: False, *, needs_slots: bool = True
    ) -> None:
        self._is_over = is_over
        self._needs_slots = needs_slots
        self._waiting: OrderedDict[K, float] = OrderedDict()
        self._slots: list[float] = []
        self._hide: list[tuple[K, float]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._hide)

    def join(self, key: K, longest: float) -> None:
        """Add a message that waits only for its slot. ``longest``: from `longest_wait`."""
        self._waiting[key] = longest

    def lacking(self, most: int | None = None) -> list[tuple[K, float]]:
        """Return the messages without a slot, and how long each may wait.

        Args:
            most: slots that the line may have in all; ``None`` = no limit.
        """
        while self._needs_slots and len(self._slots) < len(self._waiting):
            found = list(islice(self._waiting.items(), len(self._slots), most))
            over = [key for key, _ in found if self._is_over(key)]
            if not over:
                return found
            for key in over:
                del self._waiting[key]
        return []

    def give(self, asked: Iterable[tuple[K, float]], places: Iterable[Place]) -> None:
        """Give places to the messages without a slot, in the order of ``lacking``."""
        for (key, _), place in zip(asked, places, strict=False):
            if place.is_slot:
                heapq.heappush(self._slots, place.at)
            elif key in self._waiting:
                del self._waiting[key]
                self._hide.append((key, place.at))

    def take_back(self) -> None:
        """Take all slots back from the messages."""
        self._slots.clear()

    def ready(self, now: float) -> int:
        """Return how many messages could start now. Some may be settled."""
        if not self._needs_slots:
            return len(self._waiting)
        due = sum(now - LATEST_SECONDS <= slot <= now for slot in self._slots)
        return min(len(self._waiting), due)

    def depart(self, now: float, most: float = math.inf) -> Departure[K]:
        """Take out up to ``most`` messages that start now, and the messages to hide.

        An unused slot is lost. Used later, slots would make more calls than agreed.
        """
        leaving: Departure[K] = Departure(hide=self._hide)
        self._hide = []
        while self._slots and now - self._slots[0] > LATEST_SECONDS:
            heapq.heappop(self._slots)
            leaving.missed += 1
        while self._waiting and self._has_slot(now):
            key = next(iter(self._waiting))
            if not self._is_over(key):
                if len(leaving.start) >= most:
                    break
                slot = heapq.heappop(self._slots) if self._needs_slots else math.inf
                leaving.start.append((key, slot))
            del self._waiting[key]
        if not self._waiting:
            self._slots.clear()
        return leaving

    def _has_slot(self, now: float) -> bool:
        return not self._needs_slots or bool(self._slots and self._slots[0] <= now)

    def next_at(self) -> float | None:
        """Return when ``depart`` is worth calling, or ``None`` before a place is given."""
        return self._slots[0] if self._slots else None


class RecoveryRate:
    """Calls a second that a recovering provider takes from this worker, as a bucket of tokens.

    It starts at one a second, below what 20 workers overrun a provider of 20 a second with. Each
    success adds one until the provider refuses for the first time: so it doubles in about 0.7
    seconds, but never outruns the answers of slow calls. Later it grows by a share for each
    success, and by no more than a share for each second since the last cut: so neither fast nor
    slow calls overrun the provider, and its growth does not depend on how long a call takes.

    A refusal cuts it to four fifths; the first one, when it has overrun the provider, to what the
    last second delivered. Refusals of half a second count once: many providers count the calls of
    each second, and refuse the rest of it. A failure that names no refusal cuts it only while more
    than half of the calls fail: a provider that fails one call in five is not overloaded.

    In simulated outages a backlog of a minute takes 1.1 to 1.4 times the shortest time, and up to
    14 calls per 100 messages are refused. It takes longer in two cases. Fifty workers are 1.1 to
    1.8 times as slow, and small shares cost up to 48 refused calls per 100 messages, because each
    worker searches by itself. Where half of all calls fail it takes 1.6 times, and in one run of
    four 9 times: gates open again, and the last messages wait for probes that fail.
    """

    START, LOWEST = 1.0, 0.1
    BY_CALL, BY_SECOND = 0.025, 0.025
    KEPT, SETTLE_SECONDS = 0.8, 0.5
    #: An unused rate shrinks by this share a second, because it is not tested, and blocks others.
    IDLE = 0.1
    SAVED_SECONDS = 0.5
    TOLERATED, CALLS = 0.5, 16

    def __init__(self, now: float = 0.0) -> None:
        self.rate, self._tokens = self.START, 1.0
        self._is_refused = False
        self._oks: list[float] = []
        self._failing = 0.0
        self._filled_at = self._cut_at = self._grown_at = self.short_at = now

    def take(self, most: int, now: float) -> int:
        """Take tokens for up to ``most`` messages, and return their number."""
        self._fill(now)
        taken = min(most, int(self._tokens))
        self._tokens -= taken
        if taken < most:
            self.short_at = now
        return taken

    def seconds_to_turn(self, now: float) -> float:
        """Return the seconds until there is a token."""
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self.rate)

    def start_again(self) -> None:
        """Search for the provider's capacity from the start, because it has refused every call."""
        self.rate, self._is_refused = max(self.START, self.rate), False

    def ended(self, reply: Reply, began: float, now: float) -> None:
        """Note how a call ended that began at ``began``."""
        self._failing += ((reply is Reply.FAILED) - self._failing) / self.CALLS
        if reply is Reply.ANSWERED:
            self._grow(now)
            return
        if reply is Reply.FAILED:
            if self._failing <= self.TOLERATED:
                return
            self._failing /= 2
        if began > self._cut_at + (self.SETTLE_SECONDS if self._is_refused else 0):
            self._cut(now)

    def _grow(self, now: float) -> None:
        self._oks = [at for at in self._oks if at > now - 1] + [now]
        seconds, self._grown_at = min(now - self._grown_at, 1.0), now
        if now > self.short_at + 1:
            self.rate = max(self.START, self.rate * (1 - self.IDLE * seconds))
        elif not self._is_refused:
            self.rate += 1
        else:
            by_time = self.BY_SECOND * (now - self._cut_at) * seconds
            self.rate *= 1 + min(self.BY_CALL, by_time)

    def _cut(self, now: float) -> None:
        kept = self.KEPT * self.rate
        if not self._is_refused:
            kept = min(kept, max(1.0, len(self._oks)))
        self.rate, self._is_refused = max(self.LOWEST, kept), True
        self._cut_at = self._grown_at = now

    def _fill(self, now: float) -> None:
        most = max(1.0, self.rate * self.SAVED_SECONDS)
        self._tokens = min(most, self._tokens + max(0.0, now - self._filled_at) * self.rate)
        self._filled_at = max(now, self._filled_at)
