"""The threads of a worker that speak to SQS about messages that are held or settled.

One thread waits for the next call that the settlement table has due. Idle threads of the process
make the calls through the port, and enter the results. The table decides which calls may be under
way at a time: per queue one about visibility, and some removals. A call that hangs holds up its own
queue only, because its thread is not used for other calls until it ends.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..observe import events
from ..observe.health import Pulse
from ..observe.log_lines import make_logged_events
from ..sqs.calls import Calls
from ..sqs.dead_letter import DeadLetterRecord, batches, sendable, with_record, with_trace
from ..sqs.errors import Failure, Kind, Operation
from ..sqs.memory import Memory
from ..sqs.queues import Queue
from ..sqs.visibility import steady_seconds
from ..text import BUG_CALLS, error_site
from ..threads import call_in_time
from .lease import Lease, State
from .settlement import Call, Entry, SettlementTable

logger = get_logger(__name__)

#: The name of the waiting thread in the heartbeat.
_NAME = "the keeper"
_LONGEST_TURN_SECONDS = 20.0

#: The thread looks for calls at least this often, whatever the clock says.
_LONGEST_WAIT_SECONDS = 5.0

#: Pause after an unexpected error.
_AFTER_BUG_SECONDS = 1.0

#: Until a queue that could not be read is looked at again.
_POSTPONED_SECONDS = 5


class Keeper:
    """Keeps leases and carries out their settlements.

    Arguments:
        linger_seconds: how long a settlement may wait for others, to be sent in one batch.
            A worker killed in that time runs the task again, so it is short.
        clock: seconds; it never goes back.
        rng: for the jitter between tries.
    """

    def __init__(
        self,
        *,
        linger_seconds: float = 0.1,
        clock: Callable[[], float] = steady_seconds,
        rng: random.Random | None = None,
    ) -> None:
        self.clock = clock
        self.memory = Memory()
        self._table = SettlementTable(linger_seconds=linger_seconds, rng=rng)
        self.waiting_for = self._table.waiting_for
        self._calls: dict[str, Calls] = {}
        #: Of the table, and of the providers' gates, which bring its messages forward.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._waits_until: float | None = None  # while the thread waits
        self._stopping = False
        #: For the observers of this worker.
        self.events = make_logged_events()
        self.pulse = Pulse()

    # For the worker's other threads. No method here blocks on SQS.

    def hold(self, lease: Lease) -> None:
        """Renew the lease until it is settled.

        If this worker has the message already, or is done with it, the lease is settled
        immediately.
        """
        with self.lock:
            self._calls[lease.queue.url] = lease.calls
            earlier = self._table.received(lease, self.clock())
            self._look()
        if earlier is not None:
            self.memory.count_given_back(lease.message_id)  # this receive leads to no run
            lease.become(State.LOST, is_over=True)
            lease.free_place()
        elif lease.message_id in self.memory.fates:
            record = self.memory.fates.get(lease.message_id)
            if record is None or (lease.queue.is_read and lease.queue.dlq_url is None):
                lease.done()
            else:
                self.give_up(lease, record)

    def settled(self, lease: Lease) -> None:
        """Stop holding the lease, and carry its settlement out soon. Called by the lease."""
        with self.lock:
            self._calls.setdefault(lease.queue.url, lease.calls)
            if lease.state is not State.HIDE and lease.state is not State.GIVE_BACK:
                self.memory.settled(lease.message_id, lease.record)
            self._table.settled(lease, self.clock())
            self._look()
        lease.free_place()

    def lost(self, lease: Lease) -> bool:
        """Lose a message that is held, and return whether it was. Called by the lease."""
        with self.lock:
            if lease.become(State.LOST, may_be_lost=True) is None:
                return False
            self._drop_if_not_running(lease)
        lease.free_place()
        return True

    def ended(self, lease: Lease) -> None:
        """Note that the run of a lost message has ended. Called by the lease."""
        with self.lock:
            self._table.forget(lease)

    def give_up(self, lease: Lease, record: DeadLetterRecord) -> bool:
        """Make a message a dead letter. Hides it first if its dead-letter queue is not known yet.

        When it comes back, this worker does not run it again.
        """
        if lease.queue.is_read:
            return lease.dead_letter(record)
        self.memory.settled(lease.message_id, record)
        return lease.defer(_POSTPONED_SECONDS)

    def bring_forward(self, leases: Iterable[tuple[Lease, float]]) -> None:
        """Let SQS show hidden messages, each at its time, earlier than by themselves."""
        now = self.clock()
        with self.lock:
            for lease, due_at in leases:
                self._table.bring_forward(lease, due_at, now)
            self._look()

    def room_to_bring_forward(self, most: int) -> int:
        """Return how many more messages SQS may be asked to show now."""
        with self.lock:
            return self._table.room_to_bring_forward(most)

    def seconds_to_receive_for(self, queue: Queue) -> int:
        """Return the visibility timeout to name at a receive."""
        with self.lock:
            return self._table.seconds_to_receive_for(queue)

    def queue_read(self, queue: Queue) -> None:
        """Go by a queue's newest attributes for the messages that were received before, too."""
        with self.lock:
            self._table.queue_read(queue)

    def held(self) -> list[Lease]:
        with self.lock:
            return self._table.held()

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not confirmed."""
        return self._table.waiting

    def start(self) -> None:
        self._start_thread()
        self.pulse.watch(_NAME, limit_seconds=_LONGEST_TURN_SECONDS)
        self.pulse.check(_NAME, self._fault)

    def stop(self, timeout_seconds: float) -> None:
        """Give back the held messages, make the waiting calls, end the threads.

        Settlements that SQS does not take within ``timeout_seconds`` are left to the visibility
        timeout.
        """
        for lease in self.held():
            lease.release()
        self.pulse.forget(_NAME)
        if self.flush(timeout_seconds):
            logger.warning(
                "sqs_backoff.settlements_left: SQS has not confirmed %d settled message(s) in %g s;"
                " they come back when their visibility timeout ends",
                self.waiting,
                timeout_seconds,
            )

    def carry_out_late(self) -> None:
        """Carry out, in this thread, settlements that come after the end of the keeper's own."""
        while self._stopping and (call := self.next_call()) is not None:
            self.perform(call)

    def flush(self, timeout_seconds: float) -> int:
        """Make the waiting calls, end the threads, and count the unconfirmed settlements."""
        with self.lock:
            self._stopping = True
            self._table.hurry(self.clock())
            self._changed.notify()
        if self.waiting:
            with suppress(RuntimeError):  # the interpreter is ending, and starts no thread
                self._start_thread()
        self._join_thread(timeout_seconds)
        return self.waiting

    # The thread that waits

    def _start_thread(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="sqs-keeper", daemon=True)
            thread.start()  # without it no lease is renewed: let it raise
            self._thread = thread

    def _join_thread(self, timeout_seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _fault(self) -> str | None:
        """Return a text if the thread has died, or ``None`` while it lives."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return None if is_alive else "the keeper has died"

    def _look(self) -> None:
        """Wake the thread if a call is due before it would look, or if it must end."""
        is_over = self._stopping and not self.waiting
        until = self._waits_until
        if until is not None and (is_over or self._table.next_at() < until):
            self._waits_until = None
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self.pulse.note_turn(_NAME)
            try:
                if (call := self.next_call()) is not None:
                    self._hand_out(call)
                    continue
            except Exception as exc:  # noqa: BLE001
                # A bug. Without this thread no message would be renewed or settled.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
                time.sleep(_AFTER_BUG_SECONDS)
            with self.lock:
                if self._stopping and not self.waiting:
                    return
                at, now = self._table.next_at(), self.clock()
                if at > now:
                    self._waits_until = at
                    self._changed.wait(min(_LONGEST_WAIT_SECONDS, at - now))
                    self._waits_until = None

    def _hand_out(self, call: Call) -> None:
        if call_in_time(partial(self.perform, call), seconds=0) is None:
            logger.warning("sqs_backoff.no_thread_left: calls to SQS wait for each other")
            self.perform(call)

    # Calls

    def next_call(self) -> Call | None:
        """Take the call that is due now, if any. Then ``perform`` it, or ``enter`` its results."""
        with self.lock:
            call = self._table.take(self.clock())
        if self._table.events or self._table.losses:
            self._tell()
        return call

    def perform(self, call: Call) -> None:
        """Make a call, and enter its results. Never raises an ``Exception``."""
        try:
            results = carry_out(call, self._calls[call.url])
        except BaseException as exc:  # noqa: BLE001
            # The port does not raise. If it does, the leases must not stay under way for good.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
            failure = Failure(Kind.LOCAL, type(exc).__name__, is_of_call=True)
            results = [failure] * len(call.entries)
        try:
            self.enter(call, results)
        except Exception as exc:  # noqa: BLE001
            # A bug. The thread has other messages to see to; the ones of this call come back when
            # their visibility timeout ends.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))

    def enter(self, call: Call, results: Sequence[Failure | None]) -> None:
        """Enter the results of a call taken by ``next_call``."""
        with self.lock:
            self._table.answered(call, results, self.clock())
            self._look()
        if self._table.events or self._table.losses:
            self._tell()
        failures = list(filter(None, results))
        if call.operation is Operation.SEND:
            for entry, failure in zip(call.entries, results, strict=True):
                if failure is None:
                    self.memory.settled(entry.lease.message_id, None)
        settled = events.Settled(
            queue=call.entries[0].lease.queue.name,
            action=call.operation.value,
            failed=len(failures),
            code=failures[0].code if failures else None,
        )
        self.events.emit(settled)

    def _tell(self) -> None:
        with self.lock:
            happened, losses = self._table.drain()
        tells = [partial(self.events.emit, event) for event in happened]
        tells += [partial(self._on_loss, *loss) for loss in losses]
        for tell in tells:
            try:
                tell()
            except Exception as exc:  # noqa: BLE001
                # Observers and tasks may fail; the thread has other messages to see to.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))

    def _on_loss(self, lease: Lease, is_void: bool) -> None:
        with self.lock:
            if lease.state is not (State.LOST if is_void else State.HELD) or not lease.may_be_lost:
                return  # settled, or received again
            leaves = is_void or not lease.handed_to_pool()
            if leaves:  # another worker may start it; else it comes back
                lease.become(State.LOST)
                self._drop_if_not_running(lease)
        if leaves:
            lease.free_place()
        lease.tell_of_loss()

    def _drop_if_not_running(self, lease: Lease) -> None:
        """Forget a message that was lost before its task began. Called under the lock."""
        if not lease.handed_to_pool():
            self._table.forget(lease)
            self.memory.count_given_back(lease.message_id)


def carry_out(call: Call, port: Calls) -> list[Failure | None]:
    """Make a call.

    Arguments:
        call: the call that is due.
        port: of the queue of the call's messages.

    Returns:
        One result per entry. Nothing is raised that the port does not raise.
    """
    if call.operation is Operation.CHANGE_VISIBILITY:
        return port.change_visibility([(e.handle, e.seconds) for e in call.entries])
    if call.operation is Operation.DELETE:
        return port.delete([e.handle for e in call.entries])
    return _send(port, call.entries)


def _send(port: Calls, entries: Sequence[Entry]) -> list[Failure | None]:
    """Send dead letters, in as many calls as their bytes need."""
    if (dlq_url := entries[0].lease.queue.dlq_url) is None:
        return [Failure(Kind.NO_QUEUE, "NoDeadLetterQueue")] * len(entries)
    results: list[Failure | None] = [None] * len(entries)
    letters = []
    for position, entry in enumerate(entries):
        try:
            letters.append((position, _dead_letter(entry)))
        except Exception as exc:  # noqa: BLE001  # attributes of an unknown kind
            results[position] = Failure(Kind.BAD_ENTRY, type(exc).__name__)
    for batch in batches(letters):
        sent = port.on(dlq_url).send([letter for _, letter in batch])
        for (position, _), each in zip(batch, sent, strict=True):
            results[position] = each.failure
    return results


def _dead_letter(entry: Entry) -> dict[str, Any]:
    """Return a message as it came, with the record on it, as an entry without ``Id``.

    The message group is kept on standard queues too, which are fair by it.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-fair-queues.html
    A FIFO queue sends a second try with the same message ID only once.
    """
    lease, received = entry.lease, entry.lease.message
    attributes = received.get("MessageAttributes") or {}
    letter: dict[str, Any] = {
        "MessageBody": lease.body,
        "MessageAttributes": {name: sendable(value) for name, value in attributes.items()},
    }
    if lease.record is not None:
        letter["MessageAttributes"] = with_record(lease.body, attributes, lease.record)
    system = received.get("Attributes") or {}
    if "MessageGroupId" in system or lease.queue.is_fifo:
        letter["MessageGroupId"] = system.get("MessageGroupId") or "default"
    if lease.queue.is_fifo:
        letter["MessageDeduplicationId"] = lease.message_id
    return letter | with_trace(system.get("AWSTraceHeader"))
