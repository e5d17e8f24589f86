"""The threads of a worker that speak to SQS about messages that are held or settled.

One of them does all that touches a message's visibility: it renews the held leases, and hides or
gives back the settled ones. That it is one is what fences a lease: a renewal on its way has its
answer before the settlement that followed is sent, so no renewal can undo a backoff. Deletes and
dead letters need no such order (a renewal of a deleted message does nothing), so they have threads
of their own.
Both send batches: ten of a kind, or what has been waiting a moment.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from celery.utils.log import get_logger

from ..deadletter import DeadLetterRecord
from ..limits import MAX_BATCH_ENTRIES
from ..policies import FullJitter
from ..queues import Queue
from . import calls
from .lease import Lease, State
from .memory import Memory
from .parking import InFlight

__all__ = ["Keeper"]

logger = get_logger(__name__)

#: The handle is void: the message is deleted, or somebody else has received it.
_STALE = {"ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight"}

#: Ours: the visibility timeout has run out, so the message is back already, perhaps with somebody
#: else, for whom a change would be meant.
_TOO_LATE = "VisibilityTimeoutOver"

#: A person has to act; said once per queue.
_DENIED = {
    "AccessDenied",
    "AccessDeniedException",
    "NonExistentQueue",
    "QueueDoesNotExist",
    "KmsAccessDenied",
    "KmsDisabled",
    "UnsupportedOperation",
}
_DENIED_RETRY_SECONDS = 60.0

#: Between tries of a call that failed in passing.
_TRANSIENT = FullJitter(base=0.2, cap=10)

#: Of a visibility timeout: the most that settlements wait after a call that failed in passing.
_PAUSE_SHARE = 0.1

#: Settlements waiting, from which on no more messages are asked for.
_BEHIND = 1_000

#: A dead-letter queue that refuses must not make the main queue run the task again meanwhile.
_KEEP_HIDDEN_SECONDS = 300

#: Until a queue that could not be read is looked at again.
_POSTPONED_SECONDS = 5


class _Action(Enum):
    DELETE = "DeleteMessageBatch"
    HIDE = "ChangeMessageVisibilityBatch"
    DEAD_LETTER = "SendMessageBatch"


_VISIBILITY = frozenset({_Action.HIDE})
_REMOVALS = frozenset({_Action.DELETE, _Action.DEAD_LETTER})
_ALL = _VISIBILITY | _REMOVALS

#: Two, because a worker of two processes can finish tasks faster than one thread deletes them at
#: the latency of SQS (ten messages per round trip of 10 to 20 ms).
_THREADS = (_VISIBILITY, _REMOVALS, _REMOVALS)

_ACTION_OF = {
    State.DONE: _Action.DELETE,
    State.DEFERRED: _Action.HIDE,
    State.RELEASED: _Action.HIDE,
    State.DEAD_LETTERED: _Action.DEAD_LETTER,
}


class _Lane:
    """Settled leases of one queue that wait for the same call."""

    __slots__ = ("failures", "leases", "not_before", "since")

    def __init__(self) -> None:
        self.leases: deque[Lease] = deque()
        self.since = 0.0  # when the first of those waiting came
        self.not_before = 0.0
        self.failures = 0

    def ready_at(self, linger: float) -> float:
        waited = self.since if len(self.leases) >= MAX_BATCH_ENTRIES else self.since + linger
        return max(waited, self.not_before)

    def take(self) -> list[Lease]:
        return [self.leases.popleft() for _ in range(min(MAX_BATCH_ENTRIES, len(self.leases)))]


class Keeper:
    """Keeps leases and carries out their settlements.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
            A worker killed in that time runs the task again, so it is short.
        clock: seconds, monotonic.
        rng: for the jitter between tries.
    """

    def __init__(
        self,
        *,
        linger_seconds: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.clock = clock
        self.memory = Memory()
        self._in_flight = InFlight(clock)
        self._linger = linger_seconds
        self._rng = rng or random.Random()
        self._cond = threading.Condition()
        self._held: dict[Lease, None] = {}
        self._by_message: dict[str, Lease] = {}  # of those held
        self._next_renewal = math.inf
        self._lanes: dict[tuple[str, _Action], _Lane] = {}
        self._said: set[tuple[str, str, str]] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._under_way = 0  # settlements that SQS is being told of

    # What the worker's other threads call. Nothing here blocks on SQS.

    def hold(self, lease: Lease) -> None:
        """Renew the lease from now on, until it is settled."""
        with self._cond:
            self._held[lease] = None
            self._by_message.setdefault(lease.delivery.message_id, lease)
            if lease.renew_at < self._next_renewal:
                self._next_renewal = lease.renew_at
                self._cond.notify_all()

    def settled(self, lease: Lease) -> None:
        """Stop renewing the lease; carry its settlement out soon. Called by the lease."""
        with self._cond:
            self._held.pop(lease, None)
            if self._by_message.get(lease.delivery.message_id) is lease:
                del self._by_message[lease.delivery.message_id]
            if lease.state in (State.DONE, State.DEAD_LETTERED):
                self.memory.settled(lease.delivery.message_id, lease.record)
            if lease.state in _ACTION_OF:
                self._enqueue(lease)
        lease.free()

    def held(self) -> list[Lease]:
        with self._cond:
            return list(self._held)

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not been told of."""
        with self._cond:
            return self._under_way + sum(len(lane.leases) for lane in self._lanes.values())

    def recognise(self, lease: Lease) -> bool:
        """Whether this worker has the message in hand, or is done with it; then see to it.

        SQS hands a message out again when a renewal or a delete has not reached it in time.
        """
        message_id = lease.delivery.message_id
        with self._cond:
            earlier = self._by_message.get(message_id)
        if earlier is not None and earlier is not lease and lease.merge_into(earlier):
            return True
        if not self.memory.knows(message_id):
            return False
        record = self.memory.record(message_id)
        if record is not None and not lease.queue.is_read:
            self.postpone(lease, record)
        elif record is None or lease.queue.dlq_url is None:
            lease.done()
        else:
            lease.dead_letter(record)
        return True

    def postpone(self, lease: Lease, record: DeadLetterRecord) -> None:
        """Hide a message that is given up until it is known where its dead letters go.

        When it comes back it is not run again, by this worker.
        """
        self.memory.settled(lease.delivery.message_id, record)
        lease.defer(_POSTPONED_SECONDS)

    @property
    def is_behind(self) -> bool:
        """Whether so many settlements wait that the worker should not take on more messages."""
        return self.waiting > _BEHIND

    def start(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, args=(actions,), name="sqs-keeper", daemon=True)
                for actions in _THREADS
            ]
            for thread in self._threads:
                thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Give back what is held, send what is waiting, end the thread.

        What SQS does not take within ``timeout_seconds`` is left to the visibility timeout.
        """
        for lease in self.held():
            lease.release()
        with self._cond:
            self._stopping = True
            self._cond.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.waiting:
            logger.warning(
                "%d settled message(s) could not be reported to SQS in %g s: they come back when"
                " their visibility timeout ends",
                self.waiting,
                timeout_seconds,
            )

    # The threads

    def _run(self, actions: frozenset[_Action]) -> None:
        while (job := self._wait_for_job(actions)) is not None:
            self.perform(job)

    def perform(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            # Whatever it was, the other leases need this thread; the messages of this job come
            # back by their visibility timeout.
            logger.exception("sqs_backoff.keeper_failed")

    def _wait_for_job(self, actions: frozenset[_Action]) -> Callable[[], None] | None:
        with self._cond:
            while True:
                now = self.clock()
                if job := self._next_job(now, actions):
                    return job
                if self._stopping and not self._lanes_in_use(_ALL) and not self._under_way:
                    self._cond.notify_all()
                    return None
                self._cond.wait(self._idle_seconds(now, actions))

    def next_job(self) -> Callable[[], None] | None:
        """What is due now, if anything: for tests that turn the crank themselves."""
        with self._cond:
            return self._next_job(self.clock(), _ALL)

    def _next_job(self, now: float, actions: frozenset[_Action]) -> Callable[[], None] | None:
        if (
            actions & _VISIBILITY
            and now >= self._next_renewal
            and (batch := self._due_for_renewal(now))
        ):
            return functools.partial(self._renew, batch)
        ready = [
            (at, key)
            for key, lane in self._lanes_in_use(actions)
            if (at := lane.ready_at(self._lane_linger)) <= now
        ]
        if not ready:
            return None
        _, key = min(ready, key=lambda item: item[0])
        batch = self._take(key, now)
        self._under_way += len(batch)
        return functools.partial(self._send, key[1], self._lanes[key], batch)

    def _lanes_in_use(self, actions: frozenset[_Action]) -> list[tuple[tuple[str, _Action], _Lane]]:
        return [
            (key, lane) for key, lane in self._lanes.items() if lane.leases and key[1] in actions
        ]

    @property
    def _lane_linger(self) -> float:
        return 0.0 if self._stopping else self._linger

    def _idle_seconds(self, now: float, actions: frozenset[_Action]) -> float | None:
        due = [lane.ready_at(self._lane_linger) for _, lane in self._lanes_in_use(actions)]
        if actions & _VISIBILITY:
            due.append(self._next_renewal)
        soonest = min(due, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - now)

    # Settlements

    def _enqueue(self, lease: Lease) -> None:
        key = (lease.queue.url, _ACTION_OF[lease.state])
        lane = self._lanes.setdefault(key, _Lane())
        if not lane.leases:
            lane.since = self.clock()
        lane.leases.append(lease)
        if len(lane.leases) in (1, MAX_BATCH_ENTRIES):
            self._cond.notify_all()

    def _take(self, key: tuple[str, _Action], now: float) -> list[Lease]:
        lane = self._lanes[key]
        batch = lane.take()
        lane.since = now
        return batch

    def _send(self, action: _Action, lane: _Lane, batch: list[Lease]) -> None:
        try:
            self._send_batch(action, lane, batch)
        finally:
            with self._cond:
                self._under_way -= len(batch)
                self._cond.notify_all()

    def _send_batch(self, action: _Action, lane: _Lane, batch: list[Lease]) -> None:
        if action is _Action.DELETE:
            results = calls.delete(batch)
        elif action is _Action.HIDE:
            results = self._hide(batch)
        else:
            results = self._dead_letter(batch)
        again = [
            lease
            for lease, code in results
            if code is not None and self._try_again(lease, action, code)
        ]
        now = self.clock()
        with self._cond:
            if not again:
                lane.failures, lane.not_before = 0, 0.0
                return
            lane.leases.extendleft(reversed(again))
            lane.failures += 1
            lane.not_before = now + self._pause(lane, batch[0].queue, results)

    def _pause(self, lane: _Lane, queue: Queue, results: calls.Results) -> float:
        """How long a lane waits after a failure, in seconds.

        Not for long, compared with the visibility timeout: what is settled next waits, too, and
        must not be received again meanwhile because of an outage that is over.
        """
        if any(code in _DENIED for _, code in results):
            return _DENIED_RETRY_SECONDS
        most = max(1.0, queue.visibility_timeout_seconds * _PAUSE_SHARE)
        return min(most, _TRANSIENT.delay(lane.failures, self._rng))

    def _hide(self, batch: list[Lease]) -> calls.Results:
        now = self.clock()
        results: calls.Results = []
        hidden = []
        for lease in batch:
            if _may_be_visible(lease, now):
                results.append((lease, _TOO_LATE))
            elif self._park(lease, now):
                results.append((lease, None))
            else:
                hidden.append(lease)
        if hidden:
            results += calls.change_visibility(
                [(lease, lease.receipt_handle, _seconds_to_hide(lease, now)) for lease in hidden]
            )
        return results

    def _park(self, lease: Lease, now: float) -> bool:
        """Make a dead letter of a backoff that the queue's quota in flight has no room for."""
        if (
            lease.state is not State.DEFERRED
            or lease.park is None
            or lease.park_above is None
            or self._in_flight.share(lease) < lease.park_above
        ):
            return False
        with self._cond:
            lease.record = lease.park(max(0.0, lease.due_at - now))
            lease.state = State.DEAD_LETTERED
            self._enqueue(lease)
        return True

    def _dead_letter(self, batch: list[Lease]) -> calls.Results:
        """Send first, delete when SQS has it: a crash in between makes a second copy, no loss."""
        results = calls.send_to_dead_letter_queue(batch)
        for lease, code in results:
            if code is None:
                with self._cond:
                    lease.state = State.DONE
                    self.memory.settled(lease.delivery.message_id, None)
                    self._enqueue(lease)
        return results

    def _try_again(self, lease: Lease, action: _Action, code: str) -> bool:
        """Whether a settlement that failed is worth another call; say so where it is not."""
        if action is _Action.DEAD_LETTER:
            return self._keep_hidden(lease, code)
        if code in _STALE or code == _TOO_LATE:
            logger.warning(
                "sqs_backoff.lease_gone: %s of message %s on %s: %s",
                action.value,
                lease.delivery.message_id,
                lease.queue.name,
                code,
            )
            return False
        if code in _DENIED:
            self._say_once(lease, action.value, code)
        if isinstance(code, calls.LostAnswer):
            lease.in_doubt = True
        # A backoff that comes too late would hide a message that somebody else may hold by now.
        return action is _Action.DELETE or self.clock() < lease.visible_at

    def _keep_hidden(self, lease: Lease, code: str) -> bool:
        """The dead-letter queue refused. The message stays, unrun, and is tried again later."""
        if code not in _DENIED and code not in _STALE:
            return True
        self._say_once(lease, f"SendMessage to {lease.queue.dlq_arn}", code)
        with self._cond:
            lease.state, lease.park = State.DEFERRED, None
            lease.due_at = self.clock() + _KEEP_HIDDEN_SECONDS
            self._enqueue(lease)
        return False

    def _say_once(self, lease: Lease, what: str, code: str) -> None:
        if (key := (lease.queue.url, what, code)) not in self._said:
            self._said.add(key)
            logger.error(
                "SQS refuses %s for queue %s (%s). Messages stay where they are until it does not."
                " This is said once per queue.",
                what,
                lease.queue.name,
                code,
            )

    # Renewals

    def _due_for_renewal(self, now: float) -> list[Lease]:
        """Up to ten leases of one queue, the most urgent first."""
        due = sorted((x for x in self._held if x.renew_at <= now), key=lambda x: x.visible_at)
        batch = [x for x in due if x.queue.url == due[0].queue.url][:MAX_BATCH_ENTRIES]
        if len(batch) == len(due):
            self._next_renewal = min(
                (x.renew_at for x in self._held if x not in batch), default=math.inf
            )
        return batch

    def _renew(self, batch: list[Lease]) -> None:
        asked_at = self.clock()
        for lease in [x for x in batch if x.renewal_seconds(asked_at) < 1]:
            batch.remove(lease)
            logger.error(
                "sqs_backoff.twelve_hours: message %s of %s is held for longer than SQS allows",
                lease.delivery.message_id,
                lease.queue.name,
            )
            lease.lose()
        if not batch:
            return
        changes = [(x, x.receipt_handle, x.renewal_seconds(asked_at)) for x in batch]
        results = calls.change_visibility(changes)
        for (lease, handle, seconds), (_, code) in zip(changes, results, strict=True):
            if lease.receipt_handle != handle:
                continue  # it has a newer one by now, which has just been received
            if code is None:
                if asked_at >= lease.visible_at:
                    lease.tell_of_loss()
                lease.renewed(asked_at, seconds)
            elif code in _STALE:
                if lease.lose():
                    logger.error(
                        "sqs_backoff.lease_lost: message %s of %s is no longer ours (%s)",
                        lease.delivery.message_id,
                        lease.queue.name,
                        code,
                    )
            else:
                if code in _DENIED:
                    self._say_once(lease, "ChangeMessageVisibilityBatch", code)
                now = self.clock()
                lease.renew_at = now + _TRANSIENT.delay(3, self._rng)
                if now >= lease.visible_at:
                    lease.tell_of_loss()
        with self._cond:
            self._next_renewal = min((x.renew_at for x in self._held), default=math.inf)


def _may_be_visible(lease: Lease, now: float) -> bool:
    """Whether somebody else may have the message by now, for whom a change would be meant.

    So it is too when an earlier try may have shown it, or hidden it until a time that is past. If
    that try did nothing, the message comes back when its visibility timeout ends.
    """
    return lease.may_be_lost or now >= lease.visible_at or (lease.in_doubt and now >= lease.due_at)


def _seconds_to_hide(lease: Lease, now: float) -> int:
    return 0 if lease.state is State.RELEASED else max(1, math.ceil(lease.due_at - now))
