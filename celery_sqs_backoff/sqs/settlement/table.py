"""Which calls are due for the messages that are held or being settled: one table, pure.

One row per message id and queue. ``take(now)`` returns the next due call, ``answered`` enters its
results; in between nothing waits. These rules are in here and in ``answers``:

- A queue has at most one call about visibility under way. That fences a settlement: a renewal that
  is on its way has its response before the backoff that followed it is sent.
- A batch goes when it is full, or when its first entry has waited ``linger_seconds``.
- What SQS refuses for one entry pauses that row, longer each time; a call that fails as a whole
  pauses its lane (the same action on the same queue), so that an outage costs few calls.
- A message that waits for its delete or its dead letter is renewed like a held one, so that nobody
  else gets it meanwhile.
- A backoff does not touch a message that somebody else may have received by now.

The caller sees to it that one thread at a time is in here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ..dead_letter import DeadLetterRecord
from ..errors import Failure, Operation
from ..limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from .agenda import Agenda
from .answers import Answers
from .book import HIDING, Book, Call, Entry, Event, Happening, Lane
from .rows import Purpose, QueueFacts, Row, Want, spread_seconds

#: Between two looks at how many messages of a queue are in flight. The figure is approximate.
_LOOK_SECONDS = 60.0

#: Renewals may be early by this share of the visibility timeout, to fill a call.
_SLACK_SHARE = 1 / 24


class SettlementTable:
    """All messages that are held or being settled.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
        rng: for the jitter between tries.
        in_flight_quota: messages of each queue, for parking.
    """

    def __init__(
        self,
        *,
        linger_seconds: float = 0.1,
        rng: random.Random | None = None,
        in_flight_quota: int = MAX_IN_FLIGHT_MESSAGES,
    ) -> None:
        self._quota = in_flight_quota
        self._book = Book(linger_seconds)
        self._answers = Answers(self._book, rng or random.Random())

    # What happens to messages

    def received(self, row: Row, now: float, *, is_last: bool = False) -> Row | None:
        """Enter a message that was received.

        Arguments:
            row: made from this receive.
            now: the time.
            is_last: SQS would move the message to its dead-letter queue at the next receive.

        Returns:
            The earlier row of the same message, if that goes on with the newer receipt handle;
            ``row`` itself is not used then. ``None``: the message is held, to be run.
        """
        earlier = self._book.rows.get(row.key)
        if earlier is not None:
            waits = earlier.want is Want.HIDE and now < earlier.due_at and not is_last
            is_removed = earlier.want in (Want.DELETE, Want.DEAD_LETTER)
            runs = earlier.want is Want.HELD or (earlier.want is Want.LOST and not earlier.is_over)
            if waits or is_removed or runs:
                earlier.hold_again(row)
                self._book.plan_visibility(earlier, now, now)
                self._book.plan_expiry(earlier, now)
                return earlier
            self._book.forget(earlier)
        self._book.enter(row, now)
        return None

    def settled(self, row: Row, now: float) -> None:
        """Enter what a row has become; the calls for it are due from now on."""
        if not self._book.is_current(row):
            if row.key in self._book.rows:
                return  # the message has been received again, and is held
            self._book.enter(row, now)
        self._book.count_settling(row, 1)
        row.is_settled, row.failures = True, 0
        if row.is_hiding:
            self._book.plan_visibility(row, now, now)
            return
        self._book.keep_content(row)
        self._book.plan_removal(row, now, now)

    def queue_read(self, queue: QueueFacts) -> None:
        """Enter where a queue's dead letters go, and how long it hides: somebody may change it."""
        for row in self._book.rows.values():
            if row.queue.url == queue.url:
                row.queue = queue

    def forget(self, row: Row) -> None:
        """End a row without any call."""
        if self._book.is_current(row):
            self._book.forget(row)

    def seconds_to_receive_for(self, queue: QueueFacts) -> int | None:
        """The visibility timeout to name at a receive; ``None``: the queue's own.

        With thousands of messages held, the first renewals of more could not all come in time.
        """
        lane = self._book.lane(queue.url, Operation.CHANGE_VISIBILITY)
        seconds = spread_seconds(len(lane.renewals))
        return seconds if seconds > queue.visibility_timeout_seconds else None

    def held(self) -> list[Row]:
        return [row for row in self._book.rows.values() if row.want is Want.HELD]

    def __len__(self) -> int:
        return len(self._book.rows)

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not confirmed."""
        return self._book.settling

    def waiting_for(self, url: str) -> int:
        """Settlements of one queue's messages that SQS has not confirmed."""
        return self._book.settling_of[url]

    def drain_events(self) -> list[Event]:
        """Return what has happened since the last time."""
        events, self._book.events = self._book.events, []
        return events

    # Calls

    def next_at(self) -> float:
        """Return when ``take`` is worth calling; infinity if there is nothing to wait for."""
        return self._book.next_at()

    def hurry(self, now: float) -> None:
        """Let no batch wait for more entries from now on."""
        self._book.hurry(now)

    def take(self, now: float) -> Call | None:
        """Return the next call that is due, if any; its results are to be given to ``answered``."""
        while (lane := self._book.next_lane(now)) is not None:
            call = self._call(lane, now)
            if call is not None:
                lane.under_way += 1
            self._book.wake(lane, now)
            if call is not None:
                return call
        return None

    def answered(self, call: Call, results: Sequence[Failure | None], now: float) -> None:
        """Enter the results of a call, one per entry, in order."""
        call.lane.under_way -= 1
        self._answers.enter(call, results, now)
        self._book.wake(call.lane, now)

    def counted(self, call: Call, in_flight: int | Failure, now: float) -> None:
        """Enter how many messages of a queue are in flight, or why nobody knows."""
        lane = call.lane
        lane.under_way -= 1
        lane.looked_at = now
        failure = in_flight if isinstance(in_flight, Failure) else None
        lane.share_in_flight = 0.0 if isinstance(in_flight, Failure) else in_flight / self._quota
        self._book.events.append(Event(Happening.LOOKED, lane.url, failure=failure))
        self._book.wake(lane, now)

    def _call(self, lane: Lane, now: float) -> Call | None:
        for row in lane.expiring.take(now, len(lane.expiring)):
            if now >= row.visible_at and row.want is Want.HELD:
                self._book.miss(row)
        if lane.call_at(now, self._book.linger_seconds) > now:
            return None
        if lane.operation is Operation.CHANGE_VISIBILITY:
            if self._must_look(lane, now):
                return Call(Operation.GET_ATTRIBUTES, lane.url, (), now, lane)
            entries = self._visibility_entries(lane, now)
        else:
            entries = self._removal_entries(lane, now)
        return Call(lane.operation, lane.url, entries, now, lane) if entries else None

    def _removal_entries(self, lane: Lane, now: float) -> list[Entry]:
        purpose = Purpose.DELETE if lane.operation is Operation.DELETE else Purpose.SEND
        entries: list[Entry] = []
        for row in lane.settling.take(now, MAX_BATCH_ENTRIES):
            row.removal_ticket = None
            has_same_dlq = not entries or row.queue.dlq_url == entries[0].row.queue.dlq_url
            if has_same_dlq and _may_join(row, entries):
                entries.append(Entry(row, purpose, row.handle))
            else:
                self._book.plan_removal(row, now, now)
        return entries

    def _visibility_entries(self, lane: Lane, now: float) -> list[Entry]:
        """The most overdue of renewals and settlements first; the other kind fills the call.

        So do renewals that are due a little later.
        """
        entries: list[Entry] = []
        agendas = [lane.renewals, lane.settling]
        agendas.sort(key=lambda agenda: agenda.due_at(now, 0.0))
        for agenda in agendas:
            self._add(entries, agenda, lane, now)
        if entries:
            slack = entries[0].row.queue.visibility_timeout_seconds * _SLACK_SHARE
            self._add(entries, lane.renewals, lane, now, slack)
        return entries

    def _add(
        self,
        entries: list[Entry],
        agenda: Agenda[Row],
        lane: Lane,
        now: float,
        slack: float = 0.0,
    ) -> None:
        for row in agenda.take(now, MAX_BATCH_ENTRIES - len(entries), slack):
            row.visibility_ticket = None
            if not _may_join(row, entries):
                self._book.plan_visibility(row, now, now)
            elif row.is_hiding:
                entries += self._hiding(row, lane, now)
            else:
                entries += self._renewing(row, lane, now)

    def _hiding(self, row: Row, lane: Lane, now: float) -> list[Entry]:
        purpose = HIDING[row.want]
        if row.may_be_visible(now):
            self._book.finish(row, Happening.TOO_LATE, purpose)
            return []
        if row.park_above is not None and lane.share_in_flight >= row.park_above:
            park, row.park_above = row.park, None
            if park is not None:
                self._park(row, park, now)
                return []
        return [Entry(row, purpose, row.handle, row.seconds_to_hide(now))]

    def _renewing(self, row: Row, lane: Lane, now: float) -> list[Entry]:
        seconds = row.seconds_to_renew(now, len(lane.renewals) + 1)
        if seconds >= 1:
            return [Entry(row, Purpose.RENEW, row.handle, seconds)]
        row.may_be_lost = True
        if row.want is Want.HELD:
            self._book.tell(Happening.TWELVE_HOURS, row)
        return []

    # Parking

    def _must_look(self, lane: Lane, now: float) -> bool:
        """Whether a backoff waits that may be parked, and the figure for that is old."""
        if now < lane.looked_at + _LOOK_SECONDS:
            return False
        rows = lane.settling.ready(now, MAX_BATCH_ENTRIES)
        return any(row.park_above is not None and not row.may_be_visible(now) for row in rows)

    def _park(self, row: Row, park: Callable[[float], DeadLetterRecord], now: float) -> None:
        """Make a dead letter of a backoff that the queue's quota in flight has no room for."""
        row.record = park(max(0.0, row.due_at - now))
        row.want, row.is_parked = Want.DEAD_LETTER, True
        self._book.tell(Happening.PARKED, row)
        self._book.keep_content(row)
        self._book.plan_visibility(row, now, now)
        self._book.plan_removal(row, now, now)


def _may_join(row: Row, entries: Sequence[Entry]) -> bool:
    return not entries or not (row.goes_alone or entries[0].row.goes_alone)
