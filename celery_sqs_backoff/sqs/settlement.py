"""Messages that a worker holds or settles, and which calls to SQS are due for them: pure.

One :class:`Row` per queue and message ID. ``take`` returns the next call that is due, and
``answered`` enters what SQS said. Nothing in here does I/O, starts threads, or knows of Celery. One
thread at a time may be in here.

- A queue has at most one call about visibility under way, so a renewal cannot overtake a backoff.
- A batch goes when it is full, or when its first entry has waited ``linger_seconds``.
- An entry that fails pauses its row, and a call that fails as a whole pauses its lane (one action
  on one queue), so that an outage costs few calls.
- A message that waits for its delete or its dead letter is renewed like a held one, so that nobody
  else gets it meanwhile.
- A backoff does not touch a message that somebody else may have received by now.
- A hidden message that its provider may bring forward stays here until it is due.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from ..retry.policies import EqualJitter, FullJitter
from .dead_letter import DeadLetterRecord
from .errors import NOT_LISTED, Failure, Kind, Operation
from .hidden import Recall
from .limits import (
    MAX_BATCH_ENTRIES,
    MAX_VISIBILITY_TIMEOUT_SECONDS,
    MAX_WAIT_TIME_SECONDS,
)
from .queues import Queue

#: A renewal asks for at least this much, however short the queue's own visibility timeout is. It
#: bounds the calls, and the time that a message of a killed worker stays hidden.
_MIN_RENEWAL_SECONDS = 10

#: SQS counts its 12 hours from before the worker saw the message: the long poll, and some network.
_TWELVE_HOURS_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 40

#: Callers that ask for a delay have kept the margin above. Here it must not be cut once more.
_HIDING_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 20

#: A renewal comes when this share of the visibility timeout is over, so two more tries fit.
_RENEW_AT_SHARE = 1 / 3

#: A renewal may be early by this share of the visibility timeout, to fill a call.
_RENEW_EARLY_SHARE = 1 / 24

#: With many messages held, each renewal asks for longer. One queue then needs at most this many
#: renewal calls a second, and no message is hidden for longer than this because of it.
_RENEWALS_PER_SECOND = 20
_MAX_SPREAD_SECONDS = 900

#: After this many failures of its delete or dead letter a message is hidden for longer each time.
#: Not sooner: after a transient failure it must be back soon if the worker is killed.
_TRANSIENT_FAILURES = 3
_FIRST_KEEP_HIDDEN_SECONDS = 30
_MAX_KEEP_HIDDEN_SECONDS = 900

#: A queue whose own visibility timeout is 0 would hand a message out again at once, so a receive
#: must ask for this instead.
_INSTEAD_OF_NO_TIMEOUT_SECONDS = 30

#: Backoff for failures that may pass by themselves.
_AFTER_TRANSIENT = FullJitter(base=0.2, cap=10)

#: Backoff for refusals that need an operator, such as a missing permission.
_AFTER_REFUSAL = EqualJitter(base=4, cap=60)

#: Backoff for a dead letter that cannot be sent.
_AFTER_UNSENT = EqualJitter(base=1, cap=300)

#: Bodies of dead letters that wait in memory for a queue that refuses them. Beyond that the message
#: is hidden, and its body is taken from its next receive.
_MAX_LETTER_BYTES = 32 * 1_048_576
_SET_ASIDE_SECONDS = 300

#: A person has to act. The message is kept, and tried seldom.
_REFUSED = {Kind.DENIED, Kind.NO_QUEUE, Kind.UNSUPPORTED, Kind.LOCAL}

#: About one entry. Where a whole call fails so, one of its entries is why.
_OF_ONE_ENTRY = {Kind.STALE_HANDLE, Kind.TOO_LONG, Kind.BAD_ENTRY}


class State(Enum):
    """The state of a message in its worker, and the purpose of a call about it."""

    HELD = "held"
    DELETE = "delete"
    DEAD_LETTER = "dead letter"
    GIVE_BACK = "give back"
    HIDE = "hide"
    HIDDEN = "hidden"
    BRING_FORWARD = "bring forward"
    LOST = "lost"


#: Why a message goes from one state to another; ``None``: it leaves the table. A message is HELD
#: when it is received. All states but HELD, HIDDEN and LOST wait for an answer of SQS.
TRANSITIONS: dict[State, dict[State | None, str]] = {
    State.HELD: {
        State.DELETE: "its task is finished, or given up without a dead letter",
        State.DEAD_LETTER: "its task is given up",
        State.GIVE_BACK: "its task has not been started",
        State.HIDE: "its task is not due yet, or is tried again",
        State.LOST: "SQS does not honour its receipt handle any more",
    },
    State.DELETE: {None: "SQS has deleted it"},
    State.DEAD_LETTER: {
        State.DELETE: "its dead letter is sent",
        State.HIDE: "its queue refuses dead letters, and too many wait in memory",
    },
    State.GIVE_BACK: {None: "SQS shows it"},
    State.HIDE: {
        State.HIDDEN: "SQS hides it, and this worker may bring it forward",
        None: "SQS hides it until it is due",
    },
    State.HIDDEN: {
        State.BRING_FORWARD: "its provider takes calls again, or this worker stops",
        None: "it is almost due",
    },
    State.BRING_FORWARD: {None: "SQS shows it earlier"},
    State.LOST: {
        State.HELD: "it is received again while its task runs",
        None: "its task has ended",
    },
}

#: States that are settled by a change of visibility.
_HIDING = frozenset({State.HIDE, State.BRING_FORWARD, State.GIVE_BACK})
_REMOVING = frozenset({State.DELETE, State.DEAD_LETTER})

#: A call whose response was lost may have ended our hold.
_IN_DOUBT = _HIDING | {State.DELETE}


class Happening(Enum):
    """Something about a message that its worker is told of."""

    SENT = "dead letter sent"
    LOST = "lease lost"
    MAY_BE_LOST = "not renewed in time"
    TWELVE_HOURS = "held for 12 hours"
    TOO_LATE = "too late to settle"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Content:
    """What a dead letter takes over from its message, as ReceiveMessage returned it."""

    body: str
    attributes: Mapping[str, Mapping[str, Any]]
    group_id: str | None
    #: AWS X-Ray's, a system attribute.
    trace_header: str | None = None


@dataclass(slots=True, eq=False)
class Row:
    """One received message, and what is known and wanted of it. Times are of one clock, seconds.

    The worker's rows are its leases, which know more.

    Arguments:
        queue: where it was received.
        message_id: its ID there.
        handle: the newest receipt handle.
        received_at: when it was received.
        guard: held while the row is settled, if several threads may try.
        hidden_seconds: what the receive asked for; ``None``: the queue's visibility timeout.
    """

    queue: Queue
    message_id: str
    handle: str
    received_at: float
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    hidden_seconds: int | None = None
    state: State = State.HELD
    #: The table knows the state. (``become`` does not wait for the table.)
    is_entered: bool = False
    #: What the table knows the message by.
    key: tuple[str, str] = field(init=False)
    visible_at: float = 0.0
    renew_at: float = 0.0
    #: HIDE, BRING_FORWARD, GIVE_BACK: when the message is to be seen again.
    due_at: float = 0.0
    #: HIDE: what allows this worker to bring it forward later; ``None``: nothing does.
    recall: Recall | None = None
    #: DEAD_LETTER: the message, and why.
    content: Content | None = None
    record: DeadLetterRecord | None = None
    #: Its visibility timeout has run out unrenewed. A standard queue still takes the receipt
    #: handle then, and applies it to the hold of another worker.
    may_be_lost: bool = False
    #: A change of visibility, DELETE: SQS may have been asked, but its response was lost.
    in_doubt: bool = False
    #: The run has ended after the message was lost, so a new receive is a new row.
    is_over: bool = False
    failures: int = 0
    #: SQS refused a whole batch for one of its entries, so this row goes alone from now on.
    goes_alone: bool = False

    def __post_init__(self) -> None:
        self.key = self.queue.url, self.message_id
        self.due_at = self.received_at
        seconds = self.hidden_seconds or self.queue.visibility_timeout_seconds
        self.extend(self.received_at, seconds or _INSTEAD_OF_NO_TIMEOUT_SECONDS)

    @property
    def is_hiding(self) -> bool:
        """Whether its settlement is a change of visibility, so that it is not renewed."""
        return self.is_entered and self.state in _HIDING

    def become(self, state: State, **facts: Any) -> State | None:
        """Settle the row, or lose it. Of a lost row that is settled, note that its run is over.

        Returns:
            What the row was. ``HELD``: this call has settled or lost it. ``LOST``: its run has
            ended now. ``None``: it was settled or lost before, and nothing has changed.
        """
        with self.guard:
            was = self.state
            if was is State.HELD:
                self.move(state, **facts)
            elif was is State.LOST and state is not State.LOST and not self.is_over:
                self.is_over = True
            else:
                return None
        return was

    def move(self, state: State, **facts: Any) -> None:
        """Go to another state, as ``TRANSITIONS`` allow."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        for name, value in facts.items():
            setattr(self, name, value)
        self.state = state

    def hold_again(self, newer: Row) -> None:
        """Go on with the receipt handle of a newer receive of the same message."""
        with self.guard:
            if self.state is State.LOST:
                self.move(State.HELD)
            self.queue, self.handle, self.received_at = newer.queue, newer.handle, newer.received_at
            self.visible_at, self.renew_at = newer.visible_at, newer.renew_at
            self.may_be_lost = self.in_doubt = False

    def extend(self, asked_at: float, seconds: int) -> None:
        """Note that the message is hidden for ``seconds`` from ``asked_at`` on."""
        self.visible_at = asked_at + seconds
        self.renew_at = asked_at + seconds * _RENEW_AT_SHARE

    def may_be_visible(self, now: float) -> bool:
        """Return whether a change could end or extend the hold of another worker.

        Also if an earlier call whose response was lost may have taken effect and expired.
        """
        return self.may_be_lost or now >= self.visible_at or (self.in_doubt and now >= self.due_at)

    def seconds_to_hide(self, now: float) -> int:
        """Return what to ask SQS for at a settlement: 0 to show the message, else at least 1."""
        if self.state is State.GIVE_BACK:
            return 0
        left = self._left(now, _HIDING_MARGIN_SECONDS)
        least = 1 if self.state is State.HIDE else 0
        return max(least, min(math.ceil(self.due_at - now), left))

    def seconds_to_renew(self, now: float, held: int) -> int:
        """Return what to ask SQS for at a renewal; 0 or less when the 12 hours are used up.

        Arguments:
            now: the time.
            held: messages of the queue that need renewals.
        """
        least = self.queue.visibility_timeout_seconds
        seconds = max(least, _MIN_RENEWAL_SECONDS, spread_seconds(held))
        lasting = self.failures - _TRANSIENT_FAILURES
        if self.state is not State.HELD and lasting > 0:
            longer = _FIRST_KEEP_HIDDEN_SECONDS * 2 ** min(lasting, 10)
            seconds = max(seconds, min(longer, _MAX_KEEP_HIDDEN_SECONDS))
        return min(seconds, self._left(now, _TWELVE_HOURS_MARGIN_SECONDS))

    def shed(self) -> None:
        """Drop what is of no use while SQS hides the message: thousands may be hidden."""

    def _left(self, now: float, margin: float) -> int:
        return int(MAX_VISIBILITY_TIMEOUT_SECONDS - margin - (now - self.received_at))


def spread_seconds(held: int) -> int:
    """Return how long to hide each of ``held`` messages of a queue, so that renewals stay few."""
    seconds = held / _RENEW_AT_SHARE / MAX_BATCH_ENTRIES / _RENEWALS_PER_SECOND
    return min(math.ceil(seconds), _MAX_SPREAD_SECONDS)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a row."""

    what: Happening
    row: Row
    purpose: State = State.HELD
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a call.

    Attributes:
        row: the message.
        purpose: the state that the entry is for. ``HELD``: the message is renewed.
        handle: its receipt handle.
        seconds: the visibility timeout that a change asks for.
    """

    row: Row
    purpose: State
    handle: str
    seconds: int = 0


class Agenda(dict[Row, float]):
    """Rows, each with the time at which it is due, in O(log n). A row is in it once.

    ``pop`` cancels a row: what is left of it in the heap is skipped, and swept now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, Row]] = []
        self._count = itertools.count()

    def put(self, row: Row, at: float) -> None:
        """Plan a row, or plan it anew."""
        self[row] = at
        heapq.heappush(self._heap, (at, next(self._count), row))
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [entry for entry in self._heap if self.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def first_at(self) -> float:
        """Return when the first row is due; infinity if there is none."""
        while self._heap:
            at, _, row = self._heap[0]
            if self.get(row) == at:
                return at
            heapq.heappop(self._heap)
        return math.inf

    def take(self, until: float, at_most: int) -> list[Row]:
        """Remove and return the rows that are due by ``until``, the first ones first."""
        rows: list[Row] = []
        while self._heap and self._heap[0][0] <= until and len(rows) < at_most:
            at, _, row = heapq.heappop(self._heap)
            if self.get(row) == at:
                del self[row]
                rows.append(row)
        return rows


@dataclass(slots=True, eq=False)
class Lane:
    """One action on one queue: what waits for it, and when it may be called.

    Arguments:
        url: of the queue of the messages.
        operation: the action.
        capacity: calls that may be under way at a time.
    """

    url: str
    operation: Operation
    capacity: int
    settling: Agenda = field(default_factory=Agenda)
    renewals: Agenda = field(default_factory=Agenda)
    under_way: int = 0
    #: Calls in a row that failed as a whole, and how the last of them failed.
    failures: int = 0
    failed_by: Kind | None = None
    not_before: float = 0.0
    #: When to look for a call; infinity: nothing waits, or no further call may be under way.
    look_at: float = math.inf


_LOOK_AT = attrgetter("look_at")


class _Lanes(dict[tuple[str, Operation], Lane]):
    def __missing__(self, key: tuple[str, Operation]) -> Lane:
        # Two deletes: tasks may end faster than one deletes them, ten per round trip.
        lane = self[key] = Lane(*key, capacity=2 if key[1] is Operation.DELETE else 1)
        return lane


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is due.

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


class SettlementTable:
    """All messages that are held or being settled.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
        rng: for the jitter between tries.
    """

    def __init__(
        self,
        *,
        linger_seconds: float = 0.1,
        rng: random.Random | None = None,
    ) -> None:
        self._linger = linger_seconds
        self._rng = rng or random.Random()
        self._rows: dict[tuple[str, str], Row] = {}
        self._lanes = _Lanes()
        #: Held and hidden rows by the end of their holds. The task of a held one is told then,
        #: whether its renewal has failed, hangs, or waits behind another call that does.
        self._holds = Agenda()
        #: What has happened since ``drain_events`` was called.
        self.events: list[Event] = []
        self._waiting: Counter[str] = Counter()
        self._unanswered = 0  # messages that SQS is asked to show earlier
        self._letters: dict[Row, int] = {}
        self._letter_bytes = 0

    # Messages

    def received(self, row: Row, now: float, *, is_last: bool = False) -> Row | None:
        """Enter a message that was received.

        Arguments:
            row: made from this receive.
            now: the time.
            is_last: SQS would move the message to its dead-letter queue at the next receive.

        Returns:
            The earlier row of the same message, if that one goes on with the newer receipt handle;
            ``row`` itself is not used then. ``None``: the message is held, to be run.
        """
        earlier = self._rows.get(row.key)
        if earlier is not None:
            waits = earlier.state is State.HIDE and now < earlier.due_at and not is_last
            is_removed = earlier.state in (State.DELETE, State.DEAD_LETTER)
            is_lost = earlier.state is State.LOST
            runs = earlier.state is State.HELD or (is_lost and not earlier.is_over)
            if waits or is_removed or runs:
                earlier.hold_again(row)
                self._plan_visibility(earlier, now)
                return earlier
            self.forget(earlier)
        self._rows[row.key] = row
        self._plan_visibility(row, now)
        return None

    def settled(self, row: Row, now: float) -> None:
        """Enter what a row has become. The calls for it are due from now on."""
        if not self.is_current(row):
            if row.key in self._rows:
                return  # received again, and held
            self._rows[row.key] = row
        self._waiting[row.queue.url] += 1
        row.is_entered, row.failures = True, 0
        self._plan_visibility(row, now)
        if not row.is_hiding:
            self._plan_removal(row, now)

    def bring_forward(self, row: Row, due_at: float, now: float) -> None:
        """Let SQS show a hidden message at ``due_at``, earlier than by itself."""
        if row.state is State.HIDDEN:
            if row.recall is not None:
                row.recall.among.discard(row)
            row.move(State.BRING_FORWARD, due_at=due_at)
            self._unanswered += 1
            self.settled(row, now)

    def room_to_bring_forward(self, most: int) -> int:
        """Return how many more messages to bring forward, with those that SQS is asked for.

        One at a time while calls fail: each may leave its messages in doubt.
        """
        lanes = self._lanes.values()
        if any(lane.failures and lane.operation is Operation.CHANGE_VISIBILITY for lane in lanes):
            most = min(most, 1)
        return max(0, most - self._unanswered)

    def queue_read(self, queue: Queue) -> None:
        """Enter a queue's newest attributes, for the messages that were received before, too."""
        for row in self._rows.values():
            if row.queue.url == queue.url:
                row.queue = queue

    def forget(self, row: Row) -> None:
        """End a row without any call."""
        if not self.is_current(row):
            return
        del self._rows[row.key]
        if row.is_entered:
            self._waiting[row.queue.url] -= 1
        self._unanswered -= row.state is State.BRING_FORWARD
        self._unplan_visibility(row)
        for operation in (Operation.DELETE, Operation.SEND):
            self._lanes[row.queue.url, operation].settling.pop(row, None)
        if row.recall is not None:
            row.recall.among.discard(row)
        if row.content is not None:
            self._drop_content(row)

    def seconds_to_receive_for(self, queue: Queue) -> int:
        """Return the visibility timeout to name at a receive.

        Not left to the queue: its own may have been lowered since it was read. With thousands of
        messages held it is longer, because the first renewals of more could not all come in time.
        """
        lane = self._lanes[queue.url, Operation.CHANGE_VISIBILITY]
        return max(queue.visibility_timeout_seconds, spread_seconds(len(lane.renewals)))

    def is_current(self, row: Row) -> bool:
        """Return whether the row is in the table: neither ended nor replaced by a newer one."""
        return self._rows.get(row.key) is row

    def held(self) -> list[Row]:
        return [row for row in self._rows.values() if row.state is State.HELD]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not confirmed."""
        return self._waiting.total()

    def waiting_for(self, url: str) -> int:
        """Return how many settlements of a queue's messages SQS has not confirmed."""
        return self._waiting[url]

    def drain_events(self) -> list[Event]:
        """Return what has happened since the last time."""
        events, self.events = self.events, []
        return events

    def next_at(self) -> float:
        """Return when ``take`` is worth calling; infinity if there is nothing to wait for."""
        looks = map(_LOOK_AT, self._lanes.values())
        return min(self._holds.first_at(), min(looks, default=math.inf))

    def hurry(self, now: float) -> None:
        """Let no batch wait for more entries from now on."""
        self._linger = 0.0
        for lane in self._lanes.values():
            self._wake(lane)

    # Calls

    def take(self, now: float) -> Call | None:
        """Return the next call that is due, if any. Give its results to ``answered``."""
        for row in self._holds.take(now, len(self._holds)):
            if row.state is State.HIDDEN:
                self.forget(row)
            elif row.state is State.HELD:
                self._miss(row)
        while lane := min(self._lanes.values(), key=_LOOK_AT, default=None):
            if lane.look_at > now:
                break
            call = self._call(lane, now)
            lane.under_way += call is not None
            self._wake(lane)
            if call is not None:
                return call
        return None

    def _call(self, lane: Lane, now: float) -> Call | None:
        # The most overdue of renewals and settlements first; the other kind fills the call.
        entries = list[Entry]()
        waiting = filter(None, (lane.renewals, lane.settling))
        for agenda in sorted(waiting, key=Agenda.first_at):
            self._fill(entries, lane, agenda, now)
        if entries and lane.renewals:
            timeout = entries[0].row.queue.visibility_timeout_seconds
            self._fill(entries, lane, lane.renewals, now, early=timeout * _RENEW_EARLY_SHARE)
        return Call(lane.operation, lane.url, entries, now, lane) if entries else None

    def _fill(
        self, entries: list[Entry], lane: Lane, agenda: Agenda, now: float, *, early: float = 0.0
    ) -> None:
        """Fill a call with what is due. All dead letters of one call go to one queue."""
        for row in agenda.take(now + early, MAX_BATCH_ENTRIES - len(entries)):
            first = entries[0].row if entries else row
            is_alone = first is not row and (row.goes_alone or first.goes_alone)
            if is_alone or row.queue.dlq_url != first.queue.dlq_url:
                agenda.put(row, now)
            elif (entry := self._entry(row, lane, now)) is not None:
                entries.append(entry)

    def _entry(self, row: Row, lane: Lane, now: float) -> Entry | None:
        """Return what to ask SQS for a row now; ``None`` if it is too late for that."""
        if lane.operation is Operation.DELETE:
            return Entry(row, State.DELETE, row.handle)
        if lane.operation is Operation.SEND:
            return Entry(row, State.DEAD_LETTER, row.handle)
        if not row.is_hiding:
            seconds = row.seconds_to_renew(now, len(lane.renewals) + 1)
            if seconds >= 1:
                return Entry(row, State.HELD, row.handle, seconds)
            row.may_be_lost = True
            if row.state is State.HELD:
                self._tell(Happening.TWELVE_HOURS, row)
            return None
        if not row.may_be_visible(now):
            return Entry(row, row.state, row.handle, row.seconds_to_hide(now))
        self._too_late(row, row.state)
        return None

    # Answers

    def answered(self, call: Call, results: Sequence[Failure | None], now: float) -> None:
        """Enter the results of a call, one per entry, in order."""
        lane, first = call.lane, call.entries[0]
        lane.under_way -= 1
        failure = next(filter(is_of_lane, results), None)
        if failure is not None:
            # Three calls that were throttled do not make the refusal after them the fourth.
            is_refused = failure.kind in _REFUSED
            is_again = lane.failed_by is not None and (lane.failed_by in _REFUSED) is is_refused
            lane.failures = lane.failures + 1 if is_again else 1
            lane.failed_by = failure.kind
            lane.not_before = now + self._pause(lane.failures, failure, first)
        elif None in results:
            lane.failures, lane.failed_by, lane.not_before = 0, None, 0.0
        for entry, result in zip(call.entries, results, strict=True):
            is_of_neighbour = result is not None and result.is_of_call and not is_of_lane(result)
            if is_of_neighbour and results.count(result) > 1:
                entry.row.goes_alone = True
                if self.is_current(entry.row):
                    self._again(entry, now)
            elif self.is_current(entry.row):
                self._enter(entry, result, call.asked_at, now)
            else:
                self._assert_newer(entry, now)
        self._wake(lane)

    def _assert_newer(self, entry: Entry, now: float) -> None:
        """A change that was meant for an earlier receive may have ended the newer one's hold."""
        newer = self._rows.get(entry.row.key)
        if newer is not None and entry.purpose not in _REMOVING:
            newer.renew_at = now
            self._plan_visibility(newer, now)

    def _enter(self, entry: Entry, failure: Failure | None, asked_at: float, now: float) -> None:
        """Enter the result of one entry into its row."""
        row, purpose = entry.row, entry.purpose
        is_void = failure is not None and failure.kind is Kind.STALE_HANDLE
        if purpose is not State.DEAD_LETTER and row.handle != entry.handle:
            row.renew_at = now  # about an older receive: assert ours
            self._again(entry, now)
        elif failure is None and purpose is State.HELD:
            self._renewed(row, asked_at, entry.seconds, now)
        elif failure is None and purpose is State.DEAD_LETTER:
            row.move(State.DELETE, failures=0)
            self._drop_content(row)
            self._tell(Happening.SENT, row, purpose)
            self._plan_removal(row, now)
        elif failure is None:
            is_kept = row.recall is not None and self._keep(row, row.recall, entry, asked_at, now)
            if not is_kept:
                self.forget(row)
        elif is_void and purpose is State.HELD:
            self._lose(row, failure, now)
        elif is_void and purpose is not State.DEAD_LETTER:
            self._too_late(row, purpose, failure)
        elif failure.kind is Kind.BAD_ENTRY and purpose is State.DEAD_LETTER and row.record:
            row.record = None  # SQS has refused the record: the dead letter goes without it
            self._again(entry, now)
        else:
            self._failed(entry, failure, now)

    def _keep(self, row: Row, recall: Recall, entry: Entry, asked_at: float, now: float) -> bool:
        """Keep a message that SQS has hidden, if it may be brought forward.

        If the hold may have ended before that, another worker may have the message.
        """
        if entry.purpose is not State.HIDE or row.in_doubt or row.may_be_visible(now):
            return False
        until = recall.among.add(row, asked_at + entry.seconds, recall, now)
        if until is None:
            return False
        self._waiting[row.queue.url] -= 1
        row.move(State.HIDDEN, is_entered=False, visible_at=until)
        row.shed()
        self._plan_visibility(row, now)
        return True

    def _renewed(self, row: Row, asked_at: float, seconds: int, now: float) -> None:
        if asked_at >= row.visible_at:
            self._miss(row)
        row.extend(asked_at, seconds)
        if row.state is State.HELD:
            row.failures = 0
        if not row.is_hiding:
            self._plan_visibility(row, now)

    def _lose(self, row: Row, failure: Failure, now: float) -> None:
        # Perhaps SQS has just deleted it for us, and the response is on its way.
        waits = row in self._lanes[row.queue.url, Operation.DELETE].settling
        crosses_delete = row.state is State.DELETE and not waits and not row.may_be_visible(now)
        if row.become(State.LOST, may_be_lost=True):
            self._tell(Happening.LOST, row, failure=failure)
        elif row.is_entered and not row.is_hiding and not crosses_delete:
            self._too_late(row, State.HELD, failure)

    def _failed(self, entry: Entry, failure: Failure, now: float) -> None:
        row, purpose = entry.row, entry.purpose
        is_refused = failure.kind in _REFUSED or failure.kind in _OF_ONE_ENTRY
        if is_refused:
            self._tell(Happening.REFUSED, row, purpose, failure)
        # An entry that SQS lists as failed was not carried out, whatever its code says.
        is_listed = not failure.is_of_call and failure is not NOT_LISTED
        if failure.kind is Kind.IN_DOUBT and not is_listed and purpose in _IN_DOUBT:
            row.in_doubt = True
        tries = row.failures + 1
        if purpose is State.HELD:
            if now >= row.visible_at:
                self._miss(row)
            if row.state is State.HELD:
                row.failures = tries
            pause = self._row_pause(max(row.failures, 3), failure, entry)
            row.renew_at = now + pause
            self._again(entry, now)
            return
        row.failures = tries
        if purpose is State.DEAD_LETTER and self._letter_bytes > _MAX_LETTER_BYTES:
            row.move(State.HIDE, due_at=now + _SET_ASIDE_SECONDS)
            self._drop_content(row)
            self._plan_visibility(row, now)
            return
        at = now + self._row_pause(tries, failure, entry)
        if purpose in _HIDING:
            at = max(now, min(at, row.visible_at))  # later it would end somebody else's hold
        self._again(entry, at)

    def _row_pause(self, tries: int, failure: Failure, entry: Entry) -> float:
        return 0.0 if is_of_lane(failure) else self._pause(tries, failure, entry)

    def _pause(self, tries: int, failure: Failure, entry: Entry) -> float:
        """Return the seconds before another try.

        After a transient failure at most a tenth of the visibility timeout: what is settled next
        waits in the same lane, and must not be received again because of an outage that is over.
        """
        timeout = entry.row.queue.visibility_timeout_seconds
        if entry.purpose is State.DEAD_LETTER:
            return _AFTER_UNSENT.delay(tries, self._rng)
        if failure.kind in _REFUSED or failure.kind in _OF_ONE_ENTRY:
            pause = _AFTER_REFUSAL.delay(tries, self._rng)
            # Refused once may be a mistake, and the renewals of the queue wait in the same lane.
            is_soon = entry.purpose is not State.DELETE and tries <= 3
            return min(pause, timeout / 6) if is_soon else pause
        most = max(min(1.0, timeout / 8), timeout / 10)
        return min(most, _AFTER_TRANSIENT.delay(tries, self._rng))

    # Rows and lanes

    def _too_late(self, row: Row, purpose: State, failure: Failure | None = None) -> None:
        """Ask nothing of SQS any more. A message that was to be seen earlier comes back anyway."""
        self.forget(row)
        if purpose is not State.BRING_FORWARD:
            self._tell(Happening.TOO_LATE, row, purpose, failure)

    def _tell(
        self,
        what: Happening,
        row: Row,
        purpose: State = State.HELD,
        failure: Failure | None = None,
    ) -> None:
        self.events.append(Event(what, row, purpose, failure))

    def _miss(self, row: Row) -> None:
        """Note that the row was not renewed in time."""
        if not row.may_be_lost:
            row.may_be_lost = True
            if row.state is State.HELD:
                self._tell(Happening.MAY_BE_LOST, row)

    def _plan_visibility(self, row: Row, at: float) -> None:
        """Plan the row's settlement, or else its next renewal and the end of its hold."""
        lane = self._unplan_visibility(row)
        if row.is_hiding:
            lane.settling.put(row, at)
        elif row.state is not State.LOST and row.state is not State.HIDDEN:
            lane.renewals.put(row, row.renew_at)
        if row.state is State.HELD or row.state is State.HIDDEN:
            self._holds.put(row, row.visible_at)
        self._wake(lane)

    def _unplan_visibility(self, row: Row) -> Lane:
        lane = self._lanes[row.queue.url, Operation.CHANGE_VISIBILITY]
        for agenda in (lane.settling, lane.renewals, self._holds):
            agenda.pop(row, None)
        return lane

    def _plan_removal(self, row: Row, at: float) -> None:
        """Plan the row's dead letter, or else its delete."""
        sends = row.state is State.DEAD_LETTER
        if sends and row.content is not None and row not in self._letters:
            self._letters[row] = len(row.content.body)
            self._letter_bytes += len(row.content.body)
        lane = self._lanes[row.queue.url, Operation.SEND if sends else Operation.DELETE]
        lane.settling.put(row, at)
        self._wake(lane)

    def _again(self, entry: Entry, at: float) -> None:
        """Put a row back where the entry came from, unless it was settled meanwhile."""
        if entry.purpose in _REMOVING:
            self._plan_removal(entry.row, at)
        elif entry.purpose is not State.HELD or not entry.row.is_hiding:
            self._plan_visibility(entry.row, at)

    def _drop_content(self, row: Row) -> None:
        self._letter_bytes -= self._letters.pop(row, 0)
        row.content = None

    def _wake(self, lane: Lane) -> None:
        """Note when to look at a lane for a call.

        A renewal is due by itself. A settlement waits a little for others, unless ten wait already,
        be it after a failure.
        """
        lane.look_at = math.inf
        if lane.under_way < lane.capacity:
            linger = self._linger if len(lane.settling) < MAX_BATCH_ENTRIES else 0.0
            at = min(lane.settling.first_at() + linger, lane.renewals.first_at())
            lane.look_at = max(at, lane.not_before)


def is_of_lane(failure: Failure | None) -> bool:
    """Whether the call failed for a reason that none of its entries is."""
    return failure is not None and failure.is_of_call and failure.kind not in _OF_ONE_ENTRY
