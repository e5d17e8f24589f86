"""Plans the calls to SQS for the messages that a worker holds or settles.

The table is :class:`SettlementTable`. Its method ``next_call`` returns the next call that is due.
The keeper makes this call, and passes the results to ``enter``. The table itself does no I/O,
starts no threads, and does not know Celery. Any thread may use it. Each public method that
changes the table takes the lock, except ``tell``, whose caller must have the lock. ``next_at``,
``waiting`` and ``waiting_for`` only read, without the lock.

A lease is one received message. Its hold is the time for which SQS hides the message from other
workers (its visibility timeout). A renewal extends the hold. A settlement deletes the message,
sends it to the dead-letter queue, hides it for a while, or gives it back (lets SQS show it at
once). To bring a hidden message forward is to let SQS show it early. A lane is one SQS action on
one queue, such as the deletes on a queue.

- At most one call that changes visibility is under way on a queue. Otherwise a renewal could arrive
  after the call that hides the same message, and undo it.
- A batch of settlements is due when it is full, or when its first entry has waited
  ``linger_seconds``. Renewals do not wait.
- If one entry of a call fails, only its message waits before the next try. If a whole call fails,
  all calls of its lane wait, so that an outage costs few calls.
- A message that waits for its delete or its dead letter is renewed like a held message, so that no
  other worker gets it.
- If another worker may have received a message, the table does not hide it or give it back,
  because the call would change the other worker's hold.
- A hidden message that this worker may bring forward stays in the table until it is almost due.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from celery.utils.log import get_logger

from ..observe import events
from ..observe.log_lines import LogLines
from ..retry.policies import EqualJitter, FullJitter
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.errors import NOT_LISTED, Blame, Failure, Kind, Operation
from ..sqs.hidden import Recall
from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from ..sqs.queues import Queue, queue_name
from ..text import BUG_CALLS, error_site
from .lease import HIDING, RENEW_AT_SHARE, Lease, State

logger = get_logger(__name__)

T = TypeVar("T")

#: A renewal may be early by this share of the visibility timeout, to fill a batch.
_RENEW_EARLY_SHARE = 1 / 24

#: If a worker holds many messages of a queue, each renewal asks for a longer visibility timeout
#: than the queue's own, so that the worker makes only about this many renewal calls a second for
#: the queue. The longer timeout is at most ``_MAX_SPREAD_SECONDS``.
_RENEWALS_PER_SECOND = 20
_MAX_SPREAD_SECONDS = 900

#: Backoff for failures that may pass by themselves.
_AFTER_TRANSIENT = FullJitter(base=0.2, cap=10)

#: Backoff for refusals that need an operator, such as a missing permission.
_AFTER_REFUSAL = EqualJitter(base=4, cap=60)

#: After a failed call, a lane counts as failing until a call succeeds. If no further call is made,
#: it counts as failing until its pause has been over for this long.
_FAILING_SECONDS = 60.0

#: Backoff after a failed send of a dead letter.
_AFTER_UNSENT = EqualJitter(base=1, cap=300)


#: The two states in which a message must leave its queue, each with the call to SQS that it needs.
_REMOVALS = {State.DELETE: Operation.DELETE, State.DEAD_LETTER: Operation.SEND}

#: In each of these states, the table waits for a response of SQS.
_SETTLING = HIDING | _REMOVALS.keys()

#: The verbs for calls in the log. For all other states, the log uses the state's value.
_VERBS = {State.HELD: "renew", State.DEAD_LETTER: "send"}

#: How many messages each attribute of :class:`Memory` keeps. The oldest are forgotten first. One
#: queue can have this many messages in flight. If all of them come back one after the other, a
#: lower limit would forget each message before it comes back.
_REMEMBERED = MAX_IN_FLIGHT_MESSAGES


def spread_seconds(held: int) -> int:
    """Return the shortest visibility timeout in seconds that a renewal must ask for.

    It grows with ``held``, the number of the queue's messages that the worker renews. For example,
    it is 15 s for 1,000 messages, and 300 s for 20,000. With a longer timeout, each message needs
    fewer renewals.
    """
    seconds = held / RENEW_AT_SHARE / MAX_BATCH_ENTRIES / _RENEWALS_PER_SECOND
    return min(math.ceil(seconds), _MAX_SPREAD_SECONDS)


@dataclass(frozen=True, slots=True)
class CallEntry:
    """One entry of a call.

    Attributes:
        lease: the message.
        purpose: the state that the call carries out. ``HELD`` means a renewal, even if the
            message itself waits for its delete or its dead letter.
        handle: the receipt handle of the message when the call was planned.
        seconds: the visibility timeout to ask for. Not used for a delete or a dead letter.
    """

    lease: Lease
    purpose: State
    handle: str
    seconds: int = 0


class Agenda(dict[Lease, float]):
    """A plan that maps leases to the times at which they are due. Changes take O(log n).

    ``pop`` removes a lease. Its entry in the heap is removed later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, Lease]] = []
        self._count = itertools.count()

    def put(self, lease: Lease, at: float) -> None:
        """Set the time at which a lease is due, in place of any earlier time."""
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
        """Remove and return the first leases that are due by ``until``, at most ``at_most``."""
        leases: list[Lease] = []
        while self.heap and self.heap[0][0] <= until and len(leases) < at_most:
            at, _, lease = heapq.heappop(self.heap)
            if self.get(lease) == at:
                del self[lease]
                leases.append(lease)
        return leases


@dataclass(slots=True, eq=False)
class Lane:
    """One SQS action on one queue, with the leases that wait for it.

    Arguments:
        url: the URL of the queue that the messages came from. If the action sends dead letters,
            this is not the URL of the dead-letter queue.
        operation: the action.
        capacity: how many calls may be under way at a time.
    """

    url: str
    operation: Operation
    capacity: int
    settling: Agenda = field(default_factory=Agenda)
    renewals: Agenda = field(default_factory=Agenda)
    under_way: int = 0
    failures: int = 0  # calls in a row that failed as a whole
    not_before: float = 0.0  # the end of the pause after a failed call
    #: When a call may be due. Infinity: no entry waits, or ``capacity`` calls are under way.
    look_at: float = math.inf


_LOOK_AT, _IS_OF_LANE = attrgetter("look_at"), attrgetter("is_of_lane")


class _Lanes(dict[tuple[str, Operation], Lane]):
    def __missing__(self, key: tuple[str, Operation]) -> Lane:
        # Two delete calls at a time, because one at a time deletes only ten messages a round trip.
        lane = self[key] = Lane(*key, capacity=2 if key[1] is Operation.DELETE else 1)
        return lane


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is due.

    Attributes:
        lane: the action, and the queue of the messages.
        entries: one to ten entries.
        asked_at: when ``next_call`` returned the call, in seconds of the table's clock.
    """

    lane: Lane
    entries: Sequence[CallEntry]
    asked_at: float


class Memory:
    """Facts that a worker remembers about its messages, in case SQS delivers a message again.

    The memory is lost with the process, and no other worker shares it. Facts that must not be lost
    are on the message itself, such as its receive count. Callers may read the attributes. Only the
    methods change them. Safe to use from any thread.

    Attributes, each by message ID:
        fates: how a message was settled. The record for a dead letter that must be sent, or
            ``None`` for a delete.
        crashes: the number of runs that count against ``crash_budget``.
        times_given_back: the number of receives that led to no run.
        due_since: since when the message has waited only for its provider (the service that its
            task calls), in seconds since the epoch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fates: OrderedDict[str, DeadLetterRecord | None] = OrderedDict()
        self.crashes: OrderedDict[str, int] = OrderedDict()
        self.times_given_back: OrderedDict[str, int] = OrderedDict()
        self.due_since: OrderedDict[str, float] = OrderedDict()

    def settled(self, message_id: str, record: DeadLetterRecord | None) -> None:
        """Note how a message is settled.

        Arguments:
            record: the record for its dead letter. The memory does not keep the error's text and
                traceback, because they may be long. ``None``: the message is deleted.
        """
        if record is not None:
            record = replace(record, exception_message=None, traceback=None)
        with self._lock:
            _remember(self.fates, message_id, record)

    def count_crash(self, message_id: str) -> int:
        """Count a crash of the message's run (``End.is_crash``). Return the count."""
        with self._lock:
            return _remember(self.crashes, message_id, self.crashes.get(message_id, 0) + 1)

    def count_given_back(self, message_id: str, *, due_since: float | None = None) -> None:
        """Count a receive of the message that leads to no run.

        Arguments:
            due_since: since when the message has waited only for its provider, in seconds since
                the epoch. ``None``: another reason kept the message from running.
        """
        with self._lock:
            if due_since is not None:
                _remember(self.due_since, message_id, due_since)
            times = self.times_given_back.get(message_id, 0)
            _remember(self.times_given_back, message_id, times + 1)


def _remember(memory: OrderedDict[str, T], key: str, value: T) -> T:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
    return value


class SettlementTable:
    """All messages that a worker holds, settles, or may bring forward.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
            It is short, because a finished task runs again if its worker is killed before its
            message is deleted.
        clock: returns seconds, and never goes back.
        rng: draws the random part of the pauses between tries.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        linger_seconds: float = 0.1,
        rng: random.Random | None = None,
    ) -> None:
        self.clock = clock
        #: The lock of the table. The providers' gates (circuit breakers) use the same lock, because
        #: they bring messages of the table forward.
        self.lock = threading.RLock()
        self.memory = Memory()
        #: The events of this worker, for its observers.
        self.events = events.Events(LogLines())
        self._linger = linger_seconds
        self._rng = rng or random.Random()
        self._leases: dict[tuple[str, str], Lease] = {}
        self._lanes = _Lanes()
        #: Leases in the states HELD and HIDDEN, by the end of their holds. When the hold of a HELD
        #: message ends, the table notifies its task, even if the renewal hangs or waits behind
        #: another call.
        self._holds = Agenda()
        #: Notifications for observers and tasks. They wait until the lock is free.
        self._news: list[Callable[[], object]] = []
        self._waiting: Counter[str] = Counter()  # unconfirmed settlements, by queue URL
        self._unanswered = 0  # messages in BRING_FORWARD

    def _note_change(self, at: float) -> None:
        """Do nothing. The table calls this under its lock.

        :class:`.Keeper` overrides this, to wake its thread if a call is due before the thread would
        look again.

        Arguments:
            at: when the next call may be due or the next hold ends.
        """

    # Messages

    def hold(self, lease: Lease) -> None:
        """Hold a message that was received, and renew it until it is settled.

        The worker may have received the message before. If the earlier lease is still in use, it
        takes the newer receipt handle, and the new lease is not used. Otherwise, if the worker
        remembers that it has deleted or dead-lettered the message, it deletes the message now, or
        first sends the dead letter if that was not sent.
        """
        with self.lock:
            earlier = self._leases.get(lease.key)
            if goes_on := earlier is not None and self._goes_on(earlier, lease):
                earlier.hold_again(lease)
                self._plan(earlier, self.clock())
                lease.move(State.LOST, is_over=True)
                self.memory.count_given_back(lease.message_id)  # this receive leads to no run
            else:
                if earlier is not None:
                    self._forget(earlier)
                self._leases[lease.key] = lease
                self._plan(lease, self.clock())
        if goes_on:
            lease.free()
            return
        try:
            record = self.memory.fates[lease.message_id]
        except KeyError:
            return
        if record is None or (lease.queue.is_read and lease.queue.dlq_url is None):
            lease.done()
        else:
            lease.dead_letter(record)

    def _goes_on(self, earlier: Lease, newer: Lease) -> bool:
        """Return whether to keep the earlier lease on a message that is received again."""
        if earlier.state is State.HIDE:
            is_last = newer.delivery.is_last_before_sqs_moves_it
            return self.clock() < earlier.due_at and not is_last
        if earlier.state is State.LOST:
            return not earlier.is_over and earlier.handed_to_pool()
        return earlier.state is State.HELD or earlier.state in _REMOVALS

    def settle(
        self, lease: Lease, state: State, *, is_finished: bool = False, **facts: Any
    ) -> bool:
        """Settle a message that is held. The call to SQS follows soon.

        Arguments:
            state: DELETE, DEAD_LETTER, HIDE or GIVE_BACK.
            is_finished: whether this worker must not run the task again, even if the message was
                lost.
            facts: attributes to set on the lease, as the state needs them.

        Returns:
            True if this call has settled the message. False if the message was settled or lost
            before. If the message was lost, this call notes that the run is over, and forgets the
            lease.
        """
        with self.lock:
            if lease.state is State.LOST and not lease.is_over:
                lease.is_over = True
                if is_finished:
                    self.memory.settled(lease.message_id, None)
                self._forget(lease)
            if lease.state is not State.HELD:
                return False
            now = self.clock()
            lease.move(state, failures=0, **facts)
            self._waiting[lease.queue.url] += 1
            if state in HIDING:
                self._plan(lease, now)
            else:  # the next renewal stays planned, so that no other worker gets the message
                self.memory.settled(lease.message_id, lease.record)
                self._holds.pop(lease, None)
                self._plan_removal(lease, now)
            if state is State.HIDE:
                delivery, options = lease.delivery, lease.options
                retry_for = None if options is None else options.retry_for
                self._note(
                    events.MessageHidden,
                    lease,
                    seconds=lease.due_at - now,
                    sent_at=delivery.sent_at,
                    eta=delivery.due_at,
                    gives_up_at=None if retry_for is None else delivery.first_due_at + retry_for,
                )
        self.tell_now()
        lease.free()
        return True

    def lose(self, lease: Lease) -> None:
        """Stop the calls for a held message that another worker may have, and notify its task."""
        with self.lock:
            if lease.state is State.HELD:
                self._lose(lease, is_void=True)
        self.tell_now()

    def bring_forward(self, leases: Iterable[tuple[Lease, float]]) -> None:
        """Plan the calls that let SQS show hidden messages early.

        Arguments:
            leases: pairs of a lease and the time at which SQS should show its message.
        """
        with self.lock:
            for lease, due_at in leases:
                if lease.state is State.HIDDEN:
                    assert lease.recall is not None
                    lease.recall.among.discard(lease)
                    self._unanswered += 1
                    lease.move(State.BRING_FORWARD, failures=0, due_at=due_at)
                    self._waiting[lease.queue.url] += 1
                    self._plan(lease, self.clock())

    def room_to_bring_forward(self, most: int) -> int:
        """Return how many more messages to bring forward now.

        To bring a message forward, the worker calls SQS. At most ``most`` messages may wait at a
        time for SQS's response to this call. While calls fail, at most one message may wait. SQS
        may have carried out a failed call, so the worker cannot tell how many messages are visible.
        """
        with self.lock:
            lanes = [x for x in self._lanes.values() if x.operation is Operation.CHANGE_VISIBILITY]
            # Only a successful call resets ``failures``, and a quiet queue may need no call for
            # long. So old failures do not count here.
            since = self.clock() - _FAILING_SECONDS
            if any(x.failures and x.not_before > since for x in lanes):
                most = min(most, 1)
            return max(0, most - self._unanswered)

    def queue_read(self, queue: Queue) -> None:
        """Use a queue's newest attributes also for its messages that were received earlier."""
        with self.lock:
            for lease in self._leases.values():
                if lease.queue.url != queue.url:
                    continue
                was_read, lease.queue = lease.queue.is_read, queue
                if lease.state is State.DEAD_LETTER and queue.is_read and not was_read:
                    if queue.dlq_url is None:
                        self._lanes[queue.url, Operation.SEND].settling.pop(lease, None)
                        lease.move(State.DELETE)
                        self.memory.settled(lease.message_id, None)
                    self._plan_removal(lease, self.clock())

    def _forget(self, lease: Lease) -> None:
        """Remove a lease and its plans from the table. The table makes no further call for it."""
        if self._leases.get(lease.key) is not lease:
            return
        del self._leases[lease.key]
        self._waiting[lease.queue.url] -= lease.state in _SETTLING
        self._unanswered -= lease.state is State.BRING_FORWARD
        self._holds.pop(lease, None)
        for operation in (Operation.CHANGE_VISIBILITY, *_REMOVALS.values()):
            if (lane := self._lanes.get((lease.queue.url, operation))) is not None:
                lane.settling.pop(lease, None)
                lane.renewals.pop(lease, None)
        if lease.recall is not None:
            lease.recall.among.discard(lease)

    def seconds_to_receive_for(self, queue: Queue) -> int:
        """Return the visibility timeout in seconds that a receive call asks for.

        Each receive call asks for a timeout, because an operator may have lowered the queue's own
        timeout since the worker read it. With the lower timeout, the first renewal could be late.
        If the worker holds thousands of messages of the queue, the call asks for a longer timeout
        than the queue's, so that renewals come in time.
        """
        with self.lock:
            lane = self._lanes[queue.url, Operation.CHANGE_VISIBILITY]
            return max(queue.visibility_timeout_seconds, spread_seconds(len(lane.renewals)))

    def held(self) -> list[Lease]:
        with self.lock:
            return [lease for lease in self._leases.values() if lease.state is State.HELD]

    @property
    def waiting(self) -> int:
        """The number of settlements that SQS has not confirmed."""
        return self._waiting.total()

    def waiting_for(self, url: str) -> int:
        """Return how many settlements of a queue's messages SQS has not confirmed."""
        return self._waiting[url]

    # Calls

    def next_at(self) -> float:
        """Return the earliest time at which a call may be due or a hold ends.

        Infinity = no call and no hold is planned.
        """
        # The first entry of the heap may be outdated. If so, the keeper's thread wakes and finds no
        # call, which costs little.
        first = self._holds.heap[0][0] if self._holds.heap else math.inf
        return min(first, min(map(_LOOK_AT, self._lanes.values()), default=math.inf))

    def hurry(self) -> None:
        """Let no batch wait for more entries from now on, because the worker stops."""
        with self.lock:
            self._linger = 0.0
            for lane in self._lanes.values():
                self._wake(lane)
            self._note_change(self.clock())

    def next_call(self) -> Call | None:
        """Return the call that is due now, or ``None``. The caller gives its results to ``enter``.

        Also note which messages were not renewed in time, and notify their tasks.
        """
        call = None
        with self.lock:
            now = self.clock()
            if self._holds.heap and self._holds.heap[0][0] <= now:
                self._end_holds(now)
            while call is None and (lane := min(self._lanes.values(), key=_LOOK_AT, default=None)):
                if lane.look_at > now:
                    break
                if entries := self._entries(lane, now):
                    call = Call(lane, entries, now)
                    lane.under_way += 1
                self._wake(lane)
        self.tell_now()
        return call

    def _end_holds(self, now: float) -> None:
        for lease in self._holds.take(now, len(self._holds.heap)):
            if lease.state is State.HIDDEN:
                self._forget(lease)
            else:
                self._miss(lease)

    def _entries(self, lane: Lane, now: float) -> list[CallEntry]:
        """Take the entries of a lane's next call. One call sends dead letters only to one queue."""
        entries = list[CallEntry]()
        # Take renewals or settlements first, whichever have been due for longer. Fill the call with
        # the other kind, and then with renewals that are almost due.
        first, second = sorted((lane.renewals, lane.settling), key=Agenda.first_at)
        for agenda, share in ((first, 0.0), (second, 0.0), (lane.renewals, _RENEW_EARLY_SHARE)):
            early = share * entries[0].lease.queue.visibility_timeout_seconds if entries else 0.0
            for lease in agenda.take(now + early, MAX_BATCH_ENTRIES - len(entries)):
                other = entries[0].lease if entries else lease
                is_alone = other is not lease and (lease.goes_alone or other.goes_alone)
                if is_alone or lease.queue.dlq_arn != other.queue.dlq_arn:
                    agenda.put(lease, now)
                elif (entry := self._entry(lease, lane, now)) is not None:
                    entries.append(entry)
        return entries

    def _entry(self, lease: Lease, lane: Lane, now: float) -> CallEntry | None:
        """Return a lease's entry for a call now.

        If a settlement would come too late, drop it, and return ``None``. If SQS cannot hide the
        message any longer, note that it is not renewed, and return ``None``.
        """
        if lane.operation is not Operation.CHANGE_VISIBILITY:
            return CallEntry(lease, lease.state, lease.handle)
        if lease.state in HIDING:
            if not lease.may_be_visible(now):
                return CallEntry(lease, lease.state, lease.handle, lease.seconds_to_hide(now))
            self._drop_late(lease, lease.state)
            return None
        seconds = lease.seconds_to_renew(now, spread_seconds(len(lane.renewals) + 1))
        if seconds >= 1:
            return CallEntry(lease, State.HELD, lease.handle, seconds)
        if lease.state is State.HELD:
            self._note(events.HeldTooLong, lease)
        self._miss(lease)
        return None

    # Results of calls

    def enter(self, call: Call, results: Sequence[Failure | None]) -> None:
        """Enter the results of a call that ``next_call`` has returned.

        Arguments:
            results: one result per entry, in the order of the entries. ``None`` is a success.
        """
        lane, first, failures = call.lane, call.entries[0], list(filter(None, results))
        with self.lock:
            now = self.clock()
            lane.under_way -= 1
            failure = next(filter(_IS_OF_LANE, failures), None)
            if failure is not None:
                lane.failures += 1
                lane.not_before = now + self._pause(
                    lane.failures, failure, first.lease, first.purpose
                )
            elif None in results:
                lane.failures, lane.not_before = 0, 0.0
            for entry, result in zip(call.entries, results, strict=True):
                lease = self._leases.get(entry.lease.key)
                if result is None and entry.purpose is State.DEAD_LETTER:
                    # The dead letter is sent, although the message may be lost by now. If the
                    # worker receives the message again, it only has to delete it.
                    self.memory.settled(entry.lease.message_id, None)
                if lease is not None:
                    is_shared = result is not None and results.count(result) > 1
                    self._enter(lease, entry, result, call.asked_at, is_shared=is_shared)
            self._wake(lane)
            settled = events.Settled(
                queue=first.lease.queue.name,
                action=lane.operation.value,
                failed=len(failures),
                code=failures[0].code if failures else None,
            )
            self.tell(settled)
        self.tell_now()

    def _enter(
        self,
        lease: Lease,
        entry: CallEntry,
        failure: Failure | None,
        asked_at: float,
        *,
        is_shared: bool,
    ) -> None:
        """Enter the result of one entry into its lease, or into a newer lease on the message."""
        purpose, now = entry.purpose, self.clock()
        is_older = lease.handle != entry.handle and purpose is not State.DEAD_LETTER
        if lease is not entry.lease or is_older:
            # Since this call was planned, the worker has received the message again. The call may
            # have changed the hold of the newer receive, so renew the message now.
            lease.renew_at = now
            if lease is entry.lease or purpose not in _REMOVALS:
                self._plan_again(lease, purpose, now)
        elif failure is None:
            self._confirm(lease, entry, asked_at, now)
        elif is_shared and failure.is_of_call and failure.kind.blame is Blame.ENTRY:
            lease.goes_alone = True
            self._plan_again(lease, purpose, now)
        elif failure.kind is Kind.STALE_HANDLE and purpose is not State.DEAD_LETTER:
            if purpose is State.HELD and lease.state is State.HELD:
                self._note(events.RenewalRefused, lease, code=failure.code)
                self._lose(lease, is_void=True)
            elif purpose is not State.HELD or lease.state is State.DEAD_LETTER:
                self._drop_late(lease, purpose, failure)
            # Else SQS has refused a renewal of a message that is being settled. The call that
            # settles the message will show the loss.
        elif failure.kind is Kind.BAD_ENTRY and lease.record and purpose is State.DEAD_LETTER:
            lease.record = None  # SQS has refused the record, so send the dead letter without it
            self._plan_again(lease, purpose, now)
        else:
            self._postpone(lease, purpose, failure, now)

    def _confirm(self, lease: Lease, entry: CallEntry, asked_at: float, now: float) -> None:
        """Carry on with a lease after its entry has succeeded."""
        if entry.purpose is State.HELD:
            if asked_at >= lease.visible_at:
                self._miss(lease)
            lease.extend(asked_at, entry.seconds)
            if lease.state is State.HELD:
                lease.failures = 0
            self._plan(lease, now)
        elif entry.purpose is State.DEAD_LETTER:
            lease.move(State.DELETE, failures=0)
            lease.shed()
            self._plan_removal(lease, now)
        elif lease.recall is None or not self._keep(entry, lease.recall, asked_at, now):
            self._forget(lease)

    def _keep(self, entry: CallEntry, recall: Recall, asked_at: float, now: float) -> bool:
        """Keep a hidden message that may be brought forward. Return whether the table keeps it.

        Do not keep it if another worker may have it. For example, its hold may have ended before
        SQS confirmed the call that hides it.
        """
        lease = entry.lease
        if entry.purpose is not State.HIDE or lease.in_doubt or lease.may_be_visible(now):
            return False
        until = recall.among.add(lease, asked_at + entry.seconds, recall, now)
        if until is None:
            return False
        self._waiting[lease.queue.url] -= 1
        lease.move(State.HIDDEN, visible_at=until)
        lease.shed()
        self._plan(lease, now)
        return True

    def _postpone(self, lease: Lease, purpose: State, failure: Failure, now: float) -> None:
        """Plan another try after a pause. Emit an event if the failure is not transient."""
        if not failure.is_transient:
            action = f"{_VERBS.get(purpose, purpose.value)} messages"
            if purpose is State.DEAD_LETTER:
                action = f"send dead letters to {queue_name(lease.queue.dlq_url or '')}"
            refused = events.SettlementRefused(
                queue=lease.queue.name, action=action, code=failure.code
            )
            self.tell(refused)
        # An entry that SQS lists as failed was not carried out, whatever its code says.
        is_listed = not failure.is_of_call and failure is not NOT_LISTED
        if failure.kind is Kind.IN_DOUBT and not is_listed and purpose in HIDING:
            lease.in_doubt = True
        if purpose is State.HELD and now >= lease.visible_at:
            self._miss(lease)
        if purpose is not State.HELD or lease.state is State.HELD:
            lease.failures += 1
        at = now
        if not failure.is_of_lane:  # else the lane pauses
            at += self._pause(max(1, lease.failures), failure, lease, purpose)
        if purpose is State.HELD:
            lease.renew_at, at = at, now
        elif purpose in HIDING:
            # Try at the end of the hold at the latest. A later call could end the hold of another
            # worker.
            at = max(now, min(at, lease.visible_at))
        self._plan_again(lease, purpose, at)

    def _pause(self, tries: int, failure: Failure, lease: Lease, purpose: State) -> float:
        """Return the pause in seconds before another try.

        A pause is at most a tenth of the visibility timeout, or 1 second if that is more. If a lane
        paused for longer, the holds of its other messages could end before their calls. Three kinds
        of pauses may be longer, namely for a dead letter, for a delete that SQS refuses, and from
        the fourth refusal of any other call on.
        """
        if purpose is State.DEAD_LETTER:
            return _AFTER_UNSENT.delay(tries, self._rng)
        policy = _AFTER_TRANSIENT if failure.is_transient else _AFTER_REFUSAL
        pause = policy.delay(tries, self._rng)
        # SQS sometimes refuses a call by mistake, so try again soon after each of the first three
        # refusals. Renewals wait in the same lane as a refused change of visibility, and a long
        # pause would make them late.
        is_soon = failure.is_transient or (purpose is not State.DELETE and tries <= 3)
        most = max(1.0, lease.queue.visibility_timeout_seconds / 10)
        return min(pause, most) if is_soon else pause

    # Events

    def _note(self, kind: Callable[..., events.OfMessage], lease: Lease, **facts: Any) -> None:
        self.tell(kind(queue=lease.queue.name, message_id=lease.message_id, **facts))

    def tell(self, event: events.WorkerEvent) -> None:
        """Queue an event for ``tell_now``. Call this with the lock.

        The event waits until the lock is released, because a listener may be slow.
        """
        self._news.append(partial(self.events.emit, event))

    def tell_now(self) -> None:
        """Notify observers and tasks of the queued news. Call this without the lock."""
        if not self._news:
            return
        with self.lock:
            news, self._news = self._news, []
        for tell in news:
            try:
                tell()
            except Exception as exc:  # noqa: BLE001
                # An observer may fail, but the thread must go on for other messages.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))

    def _drop_late(self, lease: Lease, purpose: State, failure: Failure | None = None) -> None:
        """Drop a settlement that comes too late, because another worker may have the message.

        Emit an event, but not for ``BRING_FORWARD``, because SQS shows that message anyway.
        """
        self._forget(lease)
        if purpose is not State.BRING_FORWARD:
            code = None if failure is None else failure.code
            action = _VERBS.get(purpose, purpose.value)
            self._note(events.SettlementFailed, lease, action=action, code=code)

    def _miss(self, lease: Lease) -> None:
        """Note that a lease was not renewed in time, so another worker may have its message.

        If the message is held, also note its loss, but only once.
        """
        if lease.state is State.HELD and not lease.may_be_lost:
            self._lose(lease, is_void=False)
        lease.may_be_lost = True

    def _lose(self, lease: Lease, *, is_void: bool) -> None:
        """Note that another worker may have received a held message.

        If the pool has the task, the message stays ``HELD`` and its renewals go on. With
        ``is_void``, it becomes ``LOST`` instead. If the pool does not have the task, the message
        always becomes ``LOST``, and the table forgets it.

        Arguments:
            is_void: whether to stop the renewals, for example because SQS refuses the receipt
                handle.
        """
        lease.may_be_lost, runs = True, lease.handed_to_pool()
        if is_void or not runs:
            lease.move(State.LOST)
            self._plan(lease, self.clock())
        if not runs:  # its task may start only after the message is received again
            self._forget(lease)
            self.memory.count_given_back(lease.message_id)
        self._news.append(partial(self._tell_loss, lease))

    def _tell_loss(self, lease: Lease) -> None:
        """Notify a task, once, that another worker may have its message."""
        with self.lock:
            state, tell = lease.state, lease.on_lost
            if not lease.may_be_lost or state not in (State.HELD, State.LOST):
                return  # settled, or received again
            lease.on_lost = None
        if state is State.LOST:
            lease.free()
        if tell is not None:
            tell()

    # Plans

    def _plan(self, lease: Lease, at: float) -> None:
        """Plan the next changes of a message's visibility, in place of the earlier plans.

        - A state that is one of ``HIDING``: the call for this state, at the time ``at``.
        - ``HELD``: its next renewal, and the end of its hold.
        - ``DELETE`` or ``DEAD_LETTER``: its next renewal.
        - ``HIDDEN``: the end of its hold.
        - ``LOST``: nothing.
        """
        lane = self._lanes[lease.queue.url, Operation.CHANGE_VISIBILITY]
        for agenda in (lane.settling, lane.renewals, self._holds):
            agenda.pop(lease, None)
        if lease.state in HIDING:
            lane.settling.put(lease, at)
        elif lease.state is not State.LOST and lease.state is not State.HIDDEN:
            lane.renewals.put(lease, lease.renew_at)
        if lease.state is State.HELD or lease.state is State.HIDDEN:
            self._holds.put(lease, lease.visible_at)
        self._wake(lane)

    def _plan_removal(self, lease: Lease, at: float) -> None:
        """Plan the dead letter or the delete of a message, as its state says."""
        lane = self._lanes[lease.queue.url, _REMOVALS[lease.state]]
        lane.settling.put(lease, at)
        self._wake(lane)

    def _plan_again(self, lease: Lease, purpose: State, at: float) -> None:
        """Plan another call for the ``purpose`` of an earlier entry."""
        if purpose in _REMOVALS:
            self._plan_removal(lease, at)
        else:
            self._plan(lease, at)

    def _wake(self, lane: Lane) -> None:
        """Compute when the next call of a lane may be due.

        A renewal does not wait for other entries. If there are fewer than ten settlements, the
        first settlement waits ``linger_seconds`` for more, even after a failure.
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
        first_hold = self._holds.heap[0][0] if self._holds.heap else math.inf
        self._note_change(min(first_hold, lane.look_at))
