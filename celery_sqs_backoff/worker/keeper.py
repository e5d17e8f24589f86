"""The threads of a worker that speak to SQS about messages that are held or settled.

One thread waits for the next call that the settlement table has due. Idle threads of the process
make the calls through the port, and enter the results. The table decides which calls may be under
way at a time: per queue one about visibility, and some removals. A call that hangs holds up its own
queue only, because its thread is taken out of the others' until it ends.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from celery.utils.log import get_logger

from ..observe import events
from ..observe.health import Pulse
from ..observe.log_lines import make_logged_events
from ..sqs.calls import Calls
from ..sqs.carry_out import carry_out
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.errors import Failure, Kind
from ..sqs.memory import Memory
from ..sqs.queues import Queue, queue_name
from ..sqs.settlement import Call, Event, Happening, Row, SettlementTable, State
from ..text import BUG_CALLS, error_site
from ..threads import call_in_time
from .lease import Lease

logger = get_logger(__name__)

#: What the heartbeat calls the thread that waits.
_NAME = "the keeper"
_LONGEST_TURN_SECONDS = 20.0

#: The thread looks for calls at least this often, whatever the clock says.
_LONGEST_WAIT_SECONDS = 5.0

#: Pause after an unexpected error.
_AFTER_BUG_SECONDS = 1.0

#: Until a queue that could not be read is looked at again.
_POSTPONED_SECONDS = 5


def seconds_awake_or_not() -> float:
    """A monotonic clock that goes on while a virtual machine is suspended, as SQS's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_CLOCK = seconds_awake_or_not if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


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
        clock: Callable[[], float] = _CLOCK,
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
        #: For whoever observes this worker.
        self.events = make_logged_events()
        self.pulse = Pulse()

    # What the worker's other threads call. Nothing here blocks on SQS.

    def hold(self, lease: Lease) -> None:
        """Renew the lease from now on, until it is settled.

        If this worker has the message already, or is done with it, the lease is settled at once.
        """
        now, message_id = self.clock(), lease.delivery.message_id
        with self.lock:
            self._calls[lease.queue.url] = lease.calls
            is_last = lease.delivery.is_last_before_sqs_moves_it
            earlier = self._table.received(lease, now, is_last=is_last)
            self._look()
        if earlier is not None:
            self.memory.count_given_back(message_id)  # nothing runs because of this receive
            lease.merge()
        elif message_id in self.memory.fates:
            self._settle_again(lease, self.memory.fates[message_id])

    def _settle_again(self, lease: Lease, record: DeadLetterRecord | None) -> None:
        if record is not None and not lease.queue.is_read:
            self.postpone(lease, record)
        elif record is None or lease.queue.dlq_url is None:
            lease.done()
        else:
            lease.dead_letter(record)

    def settled(self, lease: Lease) -> None:
        """Stop holding the lease; carry its settlement out soon. Called by the lease."""
        with self.lock:
            self._calls.setdefault(lease.queue.url, lease.calls)
            if lease.state is State.LOST:
                self._drop_if_not_running(lease)
            else:
                if lease.state is not State.HIDE and lease.state is not State.GIVE_BACK:
                    self.memory.settled(lease.message_id, lease.record)
                self._table.settled(lease, self.clock())
            self._look()
        lease.free_place()

    def ended(self, lease: Lease) -> None:
        """The run of a message that was lost has ended. Called by the lease."""
        with self.lock:
            self._table.forget(lease)

    def postpone(self, lease: Lease, record: DeadLetterRecord) -> None:
        """Hide a message that is given up until it is known where its dead letters go.

        When it comes back it is not run again, by this worker.
        """
        self.memory.settled(lease.delivery.message_id, record)
        lease.defer(_POSTPONED_SECONDS)

    def bring_forward(self, rows: Iterable[tuple[Row, float]]) -> None:
        """Let SQS show hidden messages, each at its time, earlier than by themselves."""
        now = self.clock()
        with self.lock:
            for row, due_at in rows:
                self._table.bring_forward(row, due_at, now)
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
            return [row for row in self._table.held() if isinstance(row, Lease)]

    @property
    def waiting(self) -> int:
        """Settlements that SQS has not confirmed."""
        return self._table.waiting

    def start(self) -> None:
        self._start_thread()
        self.pulse.watch(_NAME, limit_seconds=_LONGEST_TURN_SECONDS)
        self.pulse.check(_NAME, self._fault)

    def stop(self, timeout_seconds: float) -> None:
        """Give back what is held, send what is waiting, end the threads.

        What SQS does not take within ``timeout_seconds`` is left to the visibility timeout.
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
        """Carry out in this thread what is settled after the keeper's own threads have ended."""
        while self._stopping and (call := self.next_call()) is not None:
            self.perform(call)

    def flush(self, timeout_seconds: float) -> int:
        """Send what is waiting, and end the threads; return what SQS has not confirmed in time."""
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
            thread.start()  # without it nothing is renewed: let it raise
            self._thread = thread

    def _join_thread(self, timeout_seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _fault(self) -> str | None:
        """Say that the thread has died; ``None``: it waits, and hands calls out."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return None if is_alive else "the keeper has died"

    def _look(self) -> None:
        """Wake the thread if a call is due before it would look, or if it is to end."""
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
                # A bug. Without this thread nothing would be renewed or settled any more.
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
        """Take the call that is due now, if any; ``perform`` it, or ``enter`` its results."""
        with self.lock:
            call = self._table.take(self.clock())
        if self._table.events:
            self._tell()
        return call

    def next_at(self) -> float:
        """Return when ``next_call`` is worth calling, by the clock; infinity: nothing waits."""
        with self.lock:
            return self._table.next_at()

    def perform(self, call: Call) -> None:
        """Make a call, and enter its results. Never raises an ``Exception``."""
        try:
            results = carry_out(call, self._calls[call.url])
        except BaseException as exc:  # noqa: BLE001
            # The port does not raise. If it does, the rows must not stay under way for good.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
            failure = Failure(Kind.LOCAL, type(exc).__name__, is_of_call=True)
            results = [failure] * len(call.entries)
        try:
            self.enter(call, results)
        except Exception as exc:  # noqa: BLE001
            # A bug. The thread has other messages to see to; those of this call come back when
            # their visibility timeout ends.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))

    def enter(self, call: Call, results: Sequence[Failure | None]) -> None:
        """Enter the results of a call that was taken by ``next_call``."""
        with self.lock:
            self._table.answered(call, results, self.clock())
            self._look()
        if self._table.events:
            self._tell()
        failures = [failure for failure in results if failure is not None]
        settled = events.Settled(
            queue=call.entries[0].row.queue.name,
            action=call.operation.value,
            failed=len(failures),
            code=failures[0].code if failures else None,
        )
        self.events.emit(settled)

    # What has happened

    def _tell(self) -> None:
        with self.lock:
            happened = self._table.drain_events()
        for event in happened:
            try:
                self._handle_one(event)
            except Exception as exc:  # noqa: BLE001
                # Whom it tells may fail; the thread has other messages to see to.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))

    def _handle_one(self, event: Event) -> None:
        if (said := _report(event)) is not None:
            self.events.emit(said)
        if event.what is Happening.SENT:
            self.memory.settled(event.row.message_id, None)
        lease = event.row
        if isinstance(lease, Lease) and event.what in _LOSSES and lease.state in _UNSETTLED:
            self._on_loss(lease, event.what)

    def _on_loss(self, lease: Lease, how: Happening) -> None:
        if how is Happening.LOST:
            self._drop_if_not_running(lease)
            lease.free_place()
        elif not lease.handed_to_pool():
            lease.lose()  # somebody else may start it; if nobody does, it comes back
        lease.tell_of_loss()

    def _drop_if_not_running(self, lease: Lease) -> None:
        with self.lock:
            is_lost = lease.state is State.LOST  # not received again, and held, meanwhile
            if is_lost and not lease.handed_to_pool():
                self._table.forget(lease)
                self.memory.count_given_back(lease.delivery.message_id)


_UNSETTLED = frozenset({State.HELD, State.LOST})
_LOSSES = frozenset({Happening.LOST, Happening.MAY_BE_LOST, Happening.TWELVE_HOURS})

#: The purposes of calls, as the log names them.
_VERBS = {state: state.value for state in State} | {
    State.HELD: "renew",
    State.DEAD_LETTER: "send",
}


def _report(event: Event) -> events.WorkerEvent | None:
    """Return the event for observers of a change in the table; ``None``: it has none."""
    row, purpose, code = event.row, event.purpose, str(event.failure)
    queue, message_id = row.queue.name, row.message_id
    if event.what is Happening.LOST:
        return events.RenewalRefused(queue=queue, message_id=message_id, code=code)
    if event.what is Happening.TWELVE_HOURS:
        return events.HeldTooLong(queue=queue, message_id=message_id)
    if event.what is Happening.TOO_LATE:
        return events.SettlementFailed(
            queue=queue,
            message_id=message_id,
            action=_VERBS[purpose],
            code=None if event.failure is None else code,
        )
    if event.what is Happening.REFUSED:
        action = f"{_VERBS[purpose]} messages"
        if purpose is State.DEAD_LETTER:
            action = f"send dead letters to {queue_name(row.queue.dlq_url or '')}"
        return events.SettlementRefused(queue=queue, action=action, code=code)
    return None
