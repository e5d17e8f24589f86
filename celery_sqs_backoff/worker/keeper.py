"""Makes the calls to SQS that renew, hide, show, delete or dead-letter a worker's messages.

One thread waits until the settlement table (:mod:`.settlement`) has a call that is due. Other
threads of the worker's main process make the calls, and enter the results in the table. The table
limits the batch calls that are under way at a time: for each queue one change of visibility, two
deletes and one send of dead letters. A call that hangs holds up only calls of the same kind on
its own queue, because each call has a thread for itself.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..observe.health import Pulse
from ..sqs.calls import Calls
from ..sqs.dead_letter import batches, sendable, with_record, with_trace
from ..sqs.errors import Failure, Kind, Operation
from ..text import BUG_CALLS, error_site
from ..threads import call_in_time, steady_seconds
from .lease import Lease
from .settlement import Call, CallEntry, SettlementTable

logger = get_logger(__name__)

#: The heartbeat lists the thread that waits for due calls under this name. If one turn of the
#: thread's loop takes longer than ``_LONGEST_TURN_SECONDS``, the thread counts as hanging.
_NAME = "the keeper"
_LONGEST_TURN_SECONDS = 20.0

#: The thread checks for due calls at least once in this time, even if no call is planned.
_LONGEST_WAIT_SECONDS = 5.0

#: Pause after an unexpected error.
_AFTER_BUG_SECONDS = 1.0


class Keeper(SettlementTable):
    """The settlement table of a worker, with the threads that make its calls.

    Only the methods ``stop``, ``flush``, ``carry_out_late`` and ``perform`` wait for SQS.
    """

    def __init__(
        self,
        *,
        linger_seconds: float = 0.1,
        clock: Callable[[], float] = steady_seconds,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(linger_seconds=linger_seconds, clock=clock, rng=rng)
        self.pulse = Pulse()
        self._call_due = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._waits_until: float | None = None  # set only while the thread waits
        self._stopping = False

    def start(self) -> None:
        self._start_thread()
        limit = _LONGEST_TURN_SECONDS
        self.pulse.watch(_NAME, limit_seconds=limit, is_alive=self._is_alive)

    def stop(self, timeout_seconds: float) -> None:
        """Give back the held messages, make the calls that still wait, and end the thread.

        If SQS has not confirmed the call for a message within ``timeout_seconds``, this message
        comes back when its visibility timeout ends.
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
        """Make the due calls in the caller's thread, because the keeper's thread may have ended.

        Do nothing before ``stop`` or ``flush`` is called.
        """
        while self._stopping and (call := self.next_call()) is not None:
            self.perform(call)

    def flush(self, timeout_seconds: float) -> int:
        """Make the calls to SQS that are still planned, and end the thread.

        Wait at most ``timeout_seconds`` for this.

        Returns:
            The number of settlements that SQS has not confirmed.
        """
        self._stopping = True
        self.hurry()
        if self.waiting:
            with suppress(RuntimeError):  # the interpreter is ending, and starts no thread
                self._start_thread()
        self._join_thread(timeout_seconds)
        return self.waiting

    # The thread that waits

    def _start_thread(self) -> None:
        """Start the thread, unless it is running."""
        if not self._is_alive():
            thread = threading.Thread(target=self._run, name="sqs-keeper", daemon=True)
            # If this raises at the worker's start, the worker ends, because it has no other thread
            # that renews messages.
            thread.start()
            self._thread = thread

    def _join_thread(self, timeout_seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _note_change(self, at: float) -> None:
        """Wake the thread if it would wait beyond the time ``at``, or if it must end."""
        until = self._waits_until
        if until is not None and (self._stopping or at < until):
            self._waits_until = None
            self._call_due.notify()

    def _run(self) -> None:
        while True:
            self.pulse.note_turn(_NAME)
            try:
                if (call := self.next_call()) is not None:
                    if call_in_time(partial(self.perform, call), seconds=0) is None:
                        logger.warning(
                            "sqs_backoff.no_thread_left: no thread can be started; the worker makes"
                            " its calls to SQS one after the other"
                        )
                        self.perform(call)
                    continue
            except Exception as exc:  # noqa: BLE001
                # A bug. The thread must go on, because no other thread renews or settles messages.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
                time.sleep(_AFTER_BUG_SECONDS)
            with self.lock:
                if self._stopping and not self.waiting:
                    return
                at, now = self.next_at(), self.clock()
                if at > now:
                    self._waits_until = at
                    self._call_due.wait(min(_LONGEST_WAIT_SECONDS, at - now))
                    self._waits_until = None

    def perform(self, call: Call) -> None:
        """Make a call, and enter its results in the table. Never raises an ``Exception``."""
        try:
            results = carry_out(call)
        except BaseException as exc:  # noqa: BLE001
            # A bug, because a call reports failures as results. Each message of the call still
            # needs a result.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
            failure = Failure(Kind.LOCAL, type(exc).__name__, is_of_call=True)
            results = [failure] * len(call.entries)
        try:
            self.enter(call, results)
        except Exception as exc:  # noqa: BLE001
            # A bug. The thread must go on for other messages. The messages of this call come back
            # when their visibility timeout ends.
            logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))


def carry_out(call: Call) -> list[Failure | None]:
    """Make a call, and return one result per entry. ``None`` is a success."""
    port = call.entries[0].lease.calls
    if call.lane.operation is Operation.CHANGE_VISIBILITY:
        return port.change_visibility([(e.handle, e.seconds) for e in call.entries])
    if call.lane.operation is Operation.DELETE:
        return port.delete([e.handle for e in call.entries])
    return _send(port, call.entries)


def _send(port: Calls, entries: Sequence[CallEntry]) -> list[Failure | None]:
    """Send dead letters, in as many calls as their size needs."""
    if (dlq_url := entries[0].lease.queue.dlq_url) is None:
        # Before the attributes are read, the worker does not know the dead-letter queue.
        kind = Kind.NO_QUEUE if entries[0].lease.queue.is_read else Kind.UNREACHABLE
        return [Failure(kind, "NoDeadLetterQueue")] * len(entries)
    results: list[Failure | None] = []
    for batch in batches(enumerate(_dead_letter(entry.lease) for entry in entries)):
        results += port.on(dlq_url).send([letter for _, letter in batch])
    return results


def _dead_letter(lease: Lease) -> dict[str, Any]:
    """Return a dead letter (a message and its record) as an entry of SendMessageBatch without Id.

    The entry keeps the message group on standard queues too, where SQS uses it for fair queues.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-fair-queues.html
    On a FIFO queue the message ID is the deduplication ID, so a send that is repeated within SQS's
    five minutes makes no second copy.
    """
    received = lease.message
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
