"""Messages that a worker holds or settles, and which calls to SQS are due for them: pure.

``take`` returns the next call that is due, and ``answered`` enters the response of SQS. The table
does no I/O, starts no threads, and does not know Celery. One thread at a time may be in here.

- A queue has at most one call about visibility under way, so a renewal cannot overtake a backoff.
- A batch goes when it is full, or when its first entry has waited ``linger_seconds``.
- An entry that fails pauses its message, and a call that fails as a whole pauses its lane (one
  action on one queue), so that an outage costs few calls.
- A message that waits for its delete or its dead letter is renewed like a held one, so that no
  other worker gets it.
- A backoff does not touch a message that another worker may have received by then.
- A hidden message that its provider may bring forward stays here until it is due.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ..observe import events
from ..retry.policies import EqualJitter, FullJitter
from ..sqs.errors import NOT_LISTED, Failure, Kind, Operation
from ..sqs.hidden import Recall
from ..sqs.limits import MAX_BATCH_ENTRIES
from ..sqs.queues import Queue, queue_name
from .lease import HIDING, RENEW_AT_SHARE, Lease, State

#: A renewal may be early by this share of the visibility timeout, to fill a call.
_RENEW_EARLY_SHARE = 1 / 24

#: With many messages held, each renewal asks for longer. One queue then needs at most this many
#: renewal calls a second, and no message is hidden for longer than this because of it.
_RENEWALS_PER_SECOND = 20
_MAX_SPREAD_SECONDS = 900

#: Backoff for failures that may pass by themselves.
_AFTER_TRANSIENT = FullJitter(base=0.2, cap=10)

#: Backoff for refusals that need an operator, such as a missing permission.
_AFTER_REFUSAL = EqualJitter(base=4, cap=60)

#: Backoff for a dead letter that cannot be sent.
_AFTER_UNSENT = EqualJitter(base=1, cap=300)

#: A person has to act. The message is kept, and tried seldom.
_REFUSED = {Kind.DENIED, Kind.NO_QUEUE, Kind.UNSUPPORTED, Kind.LOCAL}

#: About one entry. Where a whole call fails so, one of its entries is why.
_OF_ONE_ENTRY = {Kind.STALE_HANDLE, Kind.TOO_LONG, Kind.BAD_ENTRY}


#: A call may have ended our hold although its response was lost.
_IN_DOUBT = HIDING | {State.DELETE}

_REMOVALS = {State.DELETE: Operation.DELETE, State.DEAD_LETTER: Operation.SEND}

#: The purposes of calls, as the log names them.
_VERBS = {state: state.value for state in State} | {
    State.HELD: "renew",
    State.DEAD_LETTER: "send",
}


def spread_seconds(held: int) -> int:
    """Return how long to hide each of ``held`` messages of a queue, so that renewals stay few."""
    seconds = held / RENEW_AT_SHARE / MAX_BATCH_ENTRIES / _RENEWALS_PER_SECOND
    return min(math.ceil(seconds), _MAX_SPREAD_SECONDS)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a call.

    Attributes:
        lease: the message.
        purpose: the state that the entry is for. ``HELD``: the message is renewed.
        handle: its receipt handle.
        seconds: the visibility timeout that a change asks for.
    """

    lease: Lease
    purpose: State
    handle: str
    seconds: int = 0


class Agenda(dict[Lease, float]):
    """Leases, each with the time at which it is due, in O(log n). A lease is in it once.

    ``pop`` cancels a lease. Its entry in the heap is skipped, and removed later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, Lease]] = []
        self._count = itertools.count()

    def put(self, lease: Lease, at: float) -> None:
        """Plan a lease, or change its plan."""
        self[lease] = at
        heapq.heappush(self.heap, (at, next(self._count), lease))
        if len(self.heap) > 2 * len(self) + 64:
            self.heap = [entry for entry in self.heap if self.get(entry[2]) == entry[0]]
            heapq.heapify(self.heap)

    def first_at(self) -> float:
        """Return when the first lease is due, or infinity if the agenda is empty."""
        while self.heap:
            at, _, lease = self.heap[0]
            if self.get(lease) == at:
                return at
            heapq.heappop(self.heap)
        return math.inf

    def take(self, until: float, at_most: int) -> list[Lease]:
        """Remove and return leases that are due by ``until``, the first ones first."""
        leases: list[Lease] = []
        while self.heap and self.heap[0][0] <= until and len(leases) < at_most:
            at, _, lease = heapq.heappop(self.heap)
            if self.get(lease) == at:
                del self[lease]
                leases.append(lease)
        return leases


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
    #: Calls in a lease that failed as a whole, and how the last of them failed.
    failures: int = 0
    failed_by: Kind | None = None
    not_before: float = 0.0
    #: When to look for a call; infinity: no entry waits, or no further call may be under way.
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
        url: the queue of the messages. A dead letter is sent to the ``dlq_url`` of that queue.
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
        self._leases: dict[tuple[str, str], Lease] = {}
        self._lanes = _Lanes()
        #: Held and hidden leases by the end of their holds. The task of a held one is told then,
        #: whether its renewal has failed, hangs, or waits behind another call that does.
        self._holds = Agenda()
        #: Events since ``drain`` was called, and leases on messages that other workers may have.
        #: The flag says that SQS has refused to renew the message.
        self.events: list[events.WorkerEvent] = []
        self.losses: list[tuple[Lease, bool]] = []
        self._waiting: Counter[str] = Counter()
        self._unanswered = 0  # messages that SQS is asked to show earlier

    # Messages

    def received(self, lease: Lease, now: float) -> Lease | None:
        """Enter a message that was received.

        Arguments:
            lease: made from this receive.
            now: the time.

        Returns:
            The earlier lease on the same message, if it goes on with the newer receipt handle.
            ``lease`` itself is not used then. ``None``: the message is held, and will run.
        """
        earlier = self._leases.get(lease.key)
        if earlier is not None:
            is_last = lease.delivery.is_last_before_sqs_moves_it
            waits = earlier.state is State.HIDE and now < earlier.due_at and not is_last
            is_removed = earlier.state in (State.DELETE, State.DEAD_LETTER)
            runs = earlier.state is State.HELD or (
                earlier.state is State.LOST and not earlier.is_over and earlier.handed_to_pool()
            )
            if waits or is_removed or runs:
                earlier.hold_again(lease)
                self._plan_visibility(earlier, now)
                return earlier
            self.forget(earlier)
        self._leases[lease.key] = lease
        self._plan_visibility(lease, now)
        return None

    def settled(self, lease: Lease, now: float) -> None:
        """Enter the new state of a message. The calls for it are due."""
        is_new = lease.key not in self._leases
        if is_new:
            self._leases[lease.key] = lease
        elif self._leases[lease.key] is not lease:
            return  # received again, and held
        self._waiting[lease.queue.url] += 1
        lease.is_entered, lease.failures = True, 0
        if is_new or lease.state in HIDING:
            self._plan_visibility(lease, now)
        else:  # its next renewal is planned
            self._holds.pop(lease, None)
        if lease.state not in HIDING:
            self._plan_removal(lease, now)

    def bring_forward(self, lease: Lease, due_at: float, now: float) -> None:
        """Let SQS show a hidden message at ``due_at``, earlier than planned."""
        if lease.state is State.HIDDEN:
            if lease.recall is not None:
                lease.recall.among.discard(lease)
            lease.move(State.BRING_FORWARD, due_at=due_at)
            self._unanswered += 1
            self.settled(lease, now)

    def room_to_bring_forward(self, most: int) -> int:
        """Return how many more messages to bring forward, less the ones that SQS is asked for.

        One at a time while calls fail: each may leave its messages in doubt.
        """
        lanes = self._lanes.values()
        if any(lane.failures and lane.operation is Operation.CHANGE_VISIBILITY for lane in lanes):
            most = min(most, 1)
        return max(0, most - self._unanswered)

    def queue_read(self, queue: Queue) -> None:
        """Enter a queue's newest attributes, for the messages that were received before, too."""
        for lease in self._leases.values():
            if lease.queue.url == queue.url:
                lease.queue = queue

    def forget(self, lease: Lease) -> None:
        """End a message without any call."""
        if self._leases.get(lease.key) is not lease:
            return
        del self._leases[lease.key]
        if lease.is_entered:
            self._waiting[lease.queue.url] -= 1
        self._unanswered -= lease.state is State.BRING_FORWARD
        self._holds.pop(lease, None)
        for operation in (Operation.CHANGE_VISIBILITY, *_REMOVALS.values()):
            lane = self._lanes[lease.queue.url, operation]
            lane.settling.pop(lease, None)
            lane.renewals.pop(lease, None)
        if lease.recall is not None:
            lease.recall.among.discard(lease)

    def seconds_to_receive_for(self, queue: Queue) -> int:
        """Return the visibility timeout to name at a receive.

        Not left to the queue: its own may have been lowered since it was read. With thousands of
        messages held it is longer, because the first renewals of more could not all come in time.
        """
        lane = self._lanes[queue.url, Operation.CHANGE_VISIBILITY]
        return max(queue.visibility_timeout_seconds, spread_seconds(len(lane.renewals)))

    def held(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.state is State.HELD]

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not confirmed."""
        return self._waiting.total()

    def waiting_for(self, url: str) -> int:
        """Return how many settlements of a queue's messages SQS has not confirmed."""
        return self._waiting[url]

    def drain(self) -> tuple[list[events.WorkerEvent], list[tuple[Lease, bool]]]:
        """Return the events and losses since the last time."""
        happened = self.events, self.losses
        self.events, self.losses = [], []
        return happened

    def next_at(self) -> float:
        """Return when ``take`` is worth calling, or infinity if no call will be due."""
        # The first hold may have been cancelled. Then `take` drops it, and has no call.
        first = self._holds.heap[0][0] if self._holds.heap else math.inf
        return min(first, min(map(_LOOK_AT, self._lanes.values()), default=math.inf))

    def hurry(self, now: float) -> None:
        """Let no batch wait for more entries."""
        self._linger = 0.0
        for lane in self._lanes.values():
            self._wake(lane)

    # Calls

    def take(self, now: float) -> Call | None:
        """Return the next call that is due, if any. Give its results to ``answered``."""
        if self._holds.heap and self._holds.heap[0][0] <= now:
            for lease in self._holds.take(now, len(self._holds.heap)):
                if lease.state is State.HIDDEN:
                    self.forget(lease)
                elif lease.state is State.HELD:
                    self._miss(lease)
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
        agendas = [agenda for agenda in (lane.renewals, lane.settling) if agenda]
        if len(agendas) == 2:
            agendas.sort(key=Agenda.first_at)
        for agenda in agendas:
            self._fill(entries, lane, agenda, now)
        if entries and lane.renewals:
            timeout = entries[0].lease.queue.visibility_timeout_seconds
            self._fill(entries, lane, lane.renewals, now, early=timeout * _RENEW_EARLY_SHARE)
        return Call(lane.operation, lane.url, entries, now, lane) if entries else None

    def _fill(
        self, entries: list[Entry], lane: Lane, agenda: Agenda, now: float, *, early: float = 0.0
    ) -> None:
        """Fill a call with the due entries. All dead letters of one call go to one queue."""
        for lease in agenda.take(now + early, MAX_BATCH_ENTRIES - len(entries)):
            first = entries[0].lease if entries else lease
            is_alone = first is not lease and (lease.goes_alone or first.goes_alone)
            if is_alone or lease.queue.dlq_url != first.queue.dlq_url:
                agenda.put(lease, now)
            elif (entry := self._entry(lease, lane, now)) is not None:
                entries.append(entry)

    def _entry(self, lease: Lease, lane: Lane, now: float) -> Entry | None:
        """Return the entry to ask of SQS for a lease now, or ``None`` if it is too late."""
        if lane.operation is Operation.DELETE:
            return Entry(lease, State.DELETE, lease.handle)
        if lane.operation is Operation.SEND:
            return Entry(lease, State.DEAD_LETTER, lease.handle)
        if not lease.is_hiding:
            seconds = lease.seconds_to_renew(now, spread_seconds(len(lane.renewals) + 1))
            if seconds >= 1:
                return Entry(lease, State.HELD, lease.handle, seconds)
            lease.may_be_lost = True
            if lease.state is State.HELD:
                queue = lease.queue.name
                self.events.append(events.HeldTooLong(queue=queue, message_id=lease.message_id))
                self.losses.append((lease, False))
            return None
        if not lease.may_be_visible(now):
            return Entry(lease, lease.state, lease.handle, lease.seconds_to_hide(now))
        self._too_late(lease, lease.state)
        return None

    # Answers

    def answered(self, call: Call, results: Sequence[Failure | None], now: float) -> None:
        """Enter the results of a call, one per entry, in order."""
        lane, first = call.lane, call.entries[0]
        lane.under_way -= 1
        failure = next(filter(is_of_lane, filter(None, results)), None)
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
                entry.lease.goes_alone = True
                if self._leases.get(entry.lease.key) is entry.lease:
                    self._again(entry, now)
            elif self._leases.get(entry.lease.key) is entry.lease:
                self._enter(entry, result, call.asked_at, now)
            else:
                self._assert_newer(entry, now)
        self._wake(lane)

    def _assert_newer(self, entry: Entry, now: float) -> None:
        """A change that was meant for an earlier receive may have ended the newer one's hold."""
        newer = self._leases.get(entry.lease.key)
        if newer is not None and entry.purpose not in _REMOVALS:
            newer.renew_at = now
            self._plan_visibility(newer, now)

    def _enter(self, entry: Entry, failure: Failure | None, asked_at: float, now: float) -> None:
        """Enter the result of one entry into its lease."""
        lease, purpose = entry.lease, entry.purpose
        is_void = failure is not None and failure.kind is Kind.STALE_HANDLE
        if purpose is not State.DEAD_LETTER and lease.handle != entry.handle:
            lease.renew_at = now  # about an older receive: assert ours
            self._again(entry, now)
        elif failure is None and purpose is State.HELD:
            self._renewed(lease, asked_at, entry.seconds, now)
        elif failure is None and purpose is State.DEAD_LETTER:
            lease.move(State.DELETE, failures=0)
            lease.shed()
            self._plan_removal(lease, now)
        elif failure is None:
            if lease.recall is None or not self._keep(entry, lease.recall, asked_at, now):
                self.forget(lease)
        elif is_void and purpose is State.HELD:
            self._lose(lease, failure, now)
        elif is_void and purpose is not State.DEAD_LETTER:
            self._too_late(lease, purpose, failure)
        elif failure.kind is Kind.BAD_ENTRY and purpose is State.DEAD_LETTER and lease.record:
            lease.record = None  # SQS has refused the record: the dead letter goes without it
            self._again(entry, now)
        else:
            self._failed(entry, failure, now)

    def _keep(self, entry: Entry, recall: Recall, asked_at: float, now: float) -> bool:
        """Keep a message that SQS has hidden, if it may be brought forward.

        If the hold may have ended before that, another worker may have the message.
        """
        lease = entry.lease
        if entry.purpose is not State.HIDE or lease.in_doubt or lease.may_be_visible(now):
            return False
        until = recall.among.add(lease, asked_at + entry.seconds, recall, now)
        if until is None:
            return False
        self._waiting[lease.queue.url] -= 1
        lease.move(State.HIDDEN, is_entered=False, visible_at=until)
        lease.shed()
        self._plan_visibility(lease, now)
        return True

    def _renewed(self, lease: Lease, asked_at: float, seconds: int, now: float) -> None:
        if asked_at >= lease.visible_at:
            self._miss(lease)
        lease.extend(asked_at, seconds)
        if lease.state is State.HELD:
            lease.failures = 0
        if not lease.is_hiding:
            self._plan_visibility(lease, now)

    def _lose(self, lease: Lease, failure: Failure, now: float) -> None:
        # Perhaps SQS has just deleted it for us, and the response is on its way.
        waits = lease in self._lanes[lease.queue.url, Operation.DELETE].settling
        crosses_delete = lease.state is State.DELETE and not waits and not lease.may_be_visible(now)
        if lease.become(State.LOST, may_be_lost=True):
            self.events.append(
                events.RenewalRefused(
                    queue=lease.queue.name, message_id=lease.message_id, code=failure.code
                )
            )
            self.losses.append((lease, True))
        elif lease.is_entered and not lease.is_hiding and not crosses_delete:
            self._too_late(lease, State.HELD, failure)

    def _failed(self, entry: Entry, failure: Failure, now: float) -> None:
        lease, purpose = entry.lease, entry.purpose
        is_refused = failure.kind in _REFUSED or failure.kind in _OF_ONE_ENTRY
        if is_refused:
            self._tell_refused(lease, purpose, failure)
        # An entry that SQS lists as failed was not carried out, whatever its code says.
        is_listed = not failure.is_of_call and failure is not NOT_LISTED
        if failure.kind is Kind.IN_DOUBT and not is_listed and purpose in _IN_DOUBT:
            lease.in_doubt = True
        tries = lease.failures + 1
        if purpose is State.HELD:
            if now >= lease.visible_at:
                self._miss(lease)
            if lease.state is State.HELD:
                lease.failures = tries
            pause = self._row_pause(max(lease.failures, 3), failure, entry)
            lease.renew_at = now + pause
            self._again(entry, now)
            return
        lease.failures = tries
        at = now + self._row_pause(tries, failure, entry)
        if purpose in HIDING:
            at = max(now, min(at, lease.visible_at))  # later it would end another worker's hold
        self._again(entry, at)

    def _row_pause(self, tries: int, failure: Failure, entry: Entry) -> float:
        return 0.0 if is_of_lane(failure) else self._pause(tries, failure, entry)

    def _pause(self, tries: int, failure: Failure, entry: Entry) -> float:
        """Return the seconds before another try.

        After a transient failure at most a tenth of the visibility timeout: the next settlement
        waits in the same lane, and must not be received again because of a past outage.
        """
        timeout = entry.lease.queue.visibility_timeout_seconds
        if entry.purpose is State.DEAD_LETTER:
            return _AFTER_UNSENT.delay(tries, self._rng)
        if failure.kind in _REFUSED or failure.kind in _OF_ONE_ENTRY:
            pause = _AFTER_REFUSAL.delay(tries, self._rng)
            # Refused once may be a mistake, and the renewals of the queue wait in the same lane.
            is_soon = entry.purpose is not State.DELETE and tries <= 3
            return min(pause, timeout / 6) if is_soon else pause
        most = max(min(1.0, timeout / 8), timeout / 10)
        return min(most, _AFTER_TRANSIENT.delay(tries, self._rng))

    # Leases and lanes

    def _too_late(self, lease: Lease, purpose: State, failure: Failure | None = None) -> None:
        """Make no further call for a lease, and tell observers unless it comes back anyway."""
        self.forget(lease)
        if purpose is not State.BRING_FORWARD:
            self.events.append(
                events.SettlementFailed(
                    queue=lease.queue.name,
                    message_id=lease.message_id,
                    action=_VERBS[purpose],
                    code=None if failure is None else failure.code,
                )
            )

    def _tell_refused(self, lease: Lease, purpose: State, failure: Failure) -> None:
        action = f"{_VERBS[purpose]} messages"
        if purpose is State.DEAD_LETTER:
            action = f"send dead letters to {queue_name(lease.queue.dlq_url or '')}"
        self.events.append(
            events.SettlementRefused(queue=lease.queue.name, action=action, code=failure.code)
        )

    def _miss(self, lease: Lease) -> None:
        """Note that the lease was not renewed in time."""
        if not lease.may_be_lost:
            lease.may_be_lost = True
            if lease.state is State.HELD:
                self.losses.append((lease, False))

    def _plan_visibility(self, lease: Lease, at: float) -> None:
        """Plan the settlement of a lease, or else its next renewal and the end of its hold."""
        lane = self._lanes[lease.queue.url, Operation.CHANGE_VISIBILITY]
        for agenda in (lane.settling, lane.renewals, self._holds):
            agenda.pop(lease, None)
        if lease.is_hiding:
            lane.settling.put(lease, at)
        elif lease.state is not State.LOST and lease.state is not State.HIDDEN:
            lane.renewals.put(lease, lease.renew_at)
        if lease.state is State.HELD or lease.state is State.HIDDEN:
            self._holds.put(lease, lease.visible_at)
        self._wake(lane)

    def _plan_removal(self, lease: Lease, at: float) -> None:
        """Plan the lease's dead letter, or else its delete."""
        lane = self._lanes[lease.queue.url, _REMOVALS[lease.state]]
        lane.settling.put(lease, at)
        self._wake(lane)

    def _again(self, entry: Entry, at: float) -> None:
        """Put a lease back where the entry came from, unless it was settled since."""
        if entry.purpose in _REMOVALS:
            self._plan_removal(entry.lease, at)
        elif entry.purpose is not State.HELD or not entry.lease.is_hiding:
            self._plan_visibility(entry.lease, at)

    def _wake(self, lane: Lane) -> None:
        """Note when to look at a lane for a call.

        A renewal is due alone. A settlement waits a little for others, unless ten wait
        already, be it after a failure.
        """
        lane.look_at = math.inf
        if lane.under_way < lane.capacity:
            at = math.inf
            if lane.settling:
                linger = self._linger if len(lane.settling) < MAX_BATCH_ENTRIES else 0.0
                at = lane.settling.first_at() + linger
            if lane.renewals:
                at = min(at, lane.renewals.first_at())
            lane.look_at = max(at, lane.not_before)


def is_of_lane(failure: Failure | None) -> bool:
    """Whether the call failed for a reason other than one of its entries."""
    return failure is not None and failure.is_of_call and failure.kind not in _OF_ONE_ENTRY
