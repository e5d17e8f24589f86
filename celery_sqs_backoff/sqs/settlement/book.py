"""The rows, and when each is due on which lane: found, planned and ended in O(log n)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..errors import Failure, Operation
from ..limits import MAX_BATCH_ENTRIES
from .agenda import Agenda
from .rows import Meaning, Purpose, Row, Want

#: Planned looks at lanes that have been moved are dropped in one sweep when they are the most.
_SWEEP_ABOVE = 64

HIDING = {Want.HIDE: Purpose.HIDE, Want.GIVE_BACK: Purpose.GIVE_BACK}


class Happening(Enum):
    """What became of a row, or of a call; every counter is a fold over these."""

    RENEWED = "renewed"
    DELETED = "deleted"
    HIDDEN = "hidden"
    GIVEN_BACK = "given back"
    PARKED = "parked"
    SENT = "dead letter sent"
    LOST = "lease lost"
    MAY_BE_LOST = "not renewed in time"
    TWELVE_HOURS = "held for 12 hours"
    TOO_LATE = "too late to settle"
    REFUSED = "refused"
    RETRIED = "tried again"
    LOOKED = "messages in flight counted"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``row`` is ``None`` where it is about the queue."""

    what: Happening
    url: str
    row: Row | None = None
    purpose: Purpose | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a call. ``seconds``: what a change of visibility asks for."""

    row: Row
    purpose: Purpose
    handle: str
    seconds: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One action on one queue: what waits for it, and when it may be called.

    Arguments:
        url: the queue of the messages.
        operation: the action.
        capacity: calls that may be under way at a time.
    """

    url: str
    operation: Operation
    capacity: int
    settling: Agenda[Row] = field(default_factory=lambda: Agenda(MAX_BATCH_ENTRIES))
    renewals: Agenda[Row] = field(default_factory=lambda: Agenda(MAX_BATCH_ENTRIES))
    #: Held rows by the end of their visibility timeout. Whoever runs one is told then, whether its
    #: renewal has failed, hangs, or waits behind another that does.
    expiring: Agenda[Row] = field(default_factory=lambda: Agenda(MAX_BATCH_ENTRIES))
    under_way: int = 0
    #: Calls in a row that failed as a whole, and what the last of them meant.
    failures: int = 0
    meaning: Meaning = Meaning.DONE
    not_before: float = 0.0
    scheduled_at: float = math.inf
    looked_at: float = -math.inf
    share_in_flight: float = 0.0

    def due_at(self, now: float, linger: float) -> float:
        """When there is something to do: a call, or somebody to be told without one."""
        return min(self.call_at(now, linger), self.expiring.due_at(now, 0.0))

    def call_at(self, now: float, linger: float) -> float:
        if self.under_way >= self.capacity:
            return math.inf
        due = min(self.settling.due_at(now, linger), self.renewals.due_at(now, 0.0))
        return max(due, self.not_before)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is due. ``GET_ATTRIBUTES`` has no entries: it counts the messages in flight.

    Attributes:
        operation: the action.
        url: the queue of the messages. A dead letter is sent to the ``dlq_url`` of its row's queue.
        entries: up to ten.
        asked_at: when.
        lane: where the results are entered.
    """

    operation: Operation
    url: str
    entries: Sequence[Entry]
    asked_at: float
    lane: Lane


class Book:
    """All rows by message, their places in the agendas, and what has happened to them.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
    """

    def __init__(self, linger_seconds: float) -> None:
        self.linger_seconds = linger_seconds
        self.rows: dict[tuple[str, str], Row] = {}
        self.events: list[Event] = []
        self.settling = 0
        self.settling_of: Counter[str] = Counter()
        #: Bytes of the dead letters that are not sent yet.
        self.letter_bytes = 0
        self._lanes: dict[tuple[str, Operation], Lane] = {}
        self._schedule: list[tuple[float, int, Lane]] = []
        self._count = itertools.count()

    # Rows

    def enter(self, row: Row, now: float) -> None:
        self.rows[row.key] = row
        self.plan_visibility(row, now, now)
        self.plan_expiry(row, now)

    def is_current(self, row: Row) -> bool:
        return self.rows.get(row.key) is row

    def forget(self, row: Row) -> None:
        del self.rows[row.key]
        if row.is_settled:
            self.count_settling(row, -1)
        _cancel(row.visibility_ticket)
        _cancel(row.removal_ticket)
        _cancel(row.expiry_ticket)
        row.visibility_ticket = row.removal_ticket = row.expiry_ticket = None
        self.drop_content(row)

    def count_settling(self, row: Row, change: int) -> None:
        """Count the settlements that SQS has not confirmed, in all and per queue."""
        self.settling += change
        self.settling_of[row.queue.url] += change

    def keep_content(self, row: Row) -> None:
        """Count the body that a dead letter keeps in memory."""
        if row.content is not None and not row.letter_bytes:
            row.letter_bytes = len(row.content.body)
            self.letter_bytes += row.letter_bytes

    def drop_content(self, row: Row) -> None:
        """The body of the message is not needed any more."""
        self.letter_bytes -= row.letter_bytes
        row.letter_bytes, row.content = 0, None

    def finish(
        self,
        row: Row,
        what: Happening,
        purpose: Purpose | None = None,
        failure: Failure | None = None,
    ) -> None:
        self.forget(row)
        self.tell(what, row, purpose, failure)

    def tell(
        self,
        what: Happening,
        row: Row,
        purpose: Purpose | None = None,
        failure: Failure | None = None,
    ) -> None:
        self.events.append(Event(what, row.queue.url, row, purpose, failure))

    # Places in the agendas

    def plan_visibility(self, row: Row, at: float, now: float) -> None:
        """Plan the row's settlement, or else its next renewal (at ``row.renew_at``)."""
        _cancel(row.visibility_ticket)
        row.visibility_ticket = None
        if row.want is Want.LOST:
            return
        lane = self.lane(row.queue.url, Operation.CHANGE_VISIBILITY)
        agenda = lane.settling if row.is_hiding else lane.renewals
        row.visibility_ticket = agenda, agenda.add(row, at if row.is_hiding else row.renew_at, now)
        self.wake(lane, now)

    def plan_removal(self, row: Row, at: float, now: float) -> None:
        """Plan the row's dead letter, or else its delete."""
        _cancel(row.removal_ticket)
        sends = row.want is Want.DEAD_LETTER and not row.is_sent
        lane = self.lane(row.queue.url, Operation.SEND if sends else Operation.DELETE)
        row.removal_ticket = lane.settling, lane.settling.add(row, at, now)
        self.wake(lane, now)

    def plan_expiry(self, row: Row, now: float) -> None:
        """Look at the row when its visibility timeout ends, whether or not a call can be made."""
        _cancel(row.expiry_ticket)
        row.expiry_ticket = None
        if row.want is not Want.HELD:
            return
        agenda = self.lane(row.queue.url, Operation.CHANGE_VISIBILITY).expiring
        row.expiry_ticket = agenda, agenda.add(row, row.visible_at, now)

    def miss(self, row: Row) -> None:
        """The row was not renewed in time."""
        if not row.may_be_lost:
            row.may_be_lost = True
            if row.want is Want.HELD:
                self.tell(Happening.MAY_BE_LOST, row, Purpose.RENEW)

    def plan_again(
        self, entry: Entry, at: float, now: float, *, renew_at: float | None = None
    ) -> None:
        """Put a row back where the entry came from."""
        row = entry.row
        if entry.purpose in (Purpose.DELETE, Purpose.SEND):
            self.plan_removal(row, at, now)
            return
        if entry.purpose is Purpose.RENEW:
            if row.is_hiding:
                return  # it was settled meanwhile, and has its place
            if renew_at is not None:
                row.renew_at = renew_at
        self.plan_visibility(row, at, now)

    # Lanes

    def lane(self, url: str, operation: Operation) -> Lane:
        lane = self._lanes.get((url, operation))
        if lane is None:
            # Two deletes at once: a worker can finish tasks faster than one deletes them at the
            # latency of SQS (ten messages per round trip of 10 to 20 ms).
            capacity = 2 if operation is Operation.DELETE else 1
            lane = self._lanes[url, operation] = Lane(url, operation, capacity)
        return lane

    def hurry(self, now: float) -> None:
        """Let no batch wait for more entries from now on."""
        self.linger_seconds = 0.0
        for lane in self._lanes.values():
            self.wake(lane, now)

    def wake(self, lane: Lane, now: float) -> None:
        """Look at a lane when it is due."""
        at = lane.due_at(now, self.linger_seconds)
        if at < lane.scheduled_at:
            lane.scheduled_at = at
            heapq.heappush(self._schedule, (at, next(self._count), lane))
            if len(self._schedule) > 2 * len(self._lanes) + _SWEEP_ABOVE:
                self._sweep()

    def _sweep(self) -> None:
        """Keep one look per lane: a renewal may be hours away, and each call notes it anew."""
        self._schedule = [
            (lane.scheduled_at, next(self._count), lane)
            for lane in self._lanes.values()
            if lane.scheduled_at < math.inf
        ]
        heapq.heapify(self._schedule)

    def next_at(self) -> float:
        return self._schedule[0][0] if self._schedule else math.inf

    def next_lane(self, now: float) -> Lane | None:
        """Return the lane that has been due for longest; it must be woken again."""
        while self._schedule and self._schedule[0][0] <= now:
            at, _, lane = heapq.heappop(self._schedule)
            if at != lane.scheduled_at:
                continue  # it was due earlier, and has been seen to
            lane.scheduled_at = math.inf
            if lane.due_at(now, self.linger_seconds) <= now:
                return lane
            self.wake(lane, now)
        return None


def _cancel(ticket: tuple[Agenda[Row], int] | None) -> None:
    if ticket is not None:
        ticket[0].cancel(ticket[1])
