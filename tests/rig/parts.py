"""Put a worker's own parts together without threads.

Apart from ``tests/rig/inside``, only this module of the rig imports the worker's private modules.
If somebody rewrites the worker, this module changes and the tests stay.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.worker import (
    keeper,
    pacing,
    poller,
    receive,
    step,
    upstream,
    window,
)

if TYPE_CHECKING:
    from .worker import Rig, Worker


class _Keeper(keeper.Keeper):
    """The part that settles messages. When a call to SQS is due, it wakes the rig, not a thread."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(clock=worker.rig.timeline, rng=worker.rig.rng)
        self._worker = worker

    def _start_thread(self) -> None:
        self._worker.wake_at(self._worker.timeline.now)

    def _join_thread(self, timeout_seconds: float) -> None:
        self._worker.flush(timeout_seconds)

    def _note_change(self, at: float) -> None:
        self._worker.wake_at(at)


class _Clients:
    """Gives the worker the fake SQS in place of boto3's clients."""

    def __init__(self, worker: Worker) -> None:
        self._sqs: Any = worker.sqs

    def attach(self, channel: Any) -> None:
        """Do nothing, because the fake needs no credentials."""

    def settling(self, url: str) -> Calls:
        return Calls(self._sqs, url)

    polling = settling


class _Stopped(threading.Event):
    """Notes how long a poller wants to pause, instead of pausing."""

    pause_seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.pause_seconds = max(self.pause_seconds, timeout or 0.0)
        return self.is_set()


class _NeverWaits(threading.Condition):
    """Counts the waits, instead of waiting."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return False


class _Poller(poller.Poller):
    """The real poller without its thread. It receives once when the rig calls ``poll``."""

    def __init__(self, worker: Worker, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._worker = worker
        self._stopped = _Stopped()
        self._stopped.set()
        self._brought = 0
        worker.pollers[self.url] = self

    def start(self) -> None:
        self._stopped.clear()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def _is_over(self, until: float) -> bool:
        room = self._window
        return self._stopped.is_set() or room._cond.waits > 1

    def _pause(self, seconds: float) -> None:
        """Note the pause after a receive that brought no message.

        On the rig, a long poll lasts until a message becomes visible, or for its full time. If a
        message was visible but not handed out, SQS did not wait. SQS does so if the queue has
        reached its quota of messages in flight.
        """
        sqs = self._worker.sqs
        at_once = sqs.next_visible_at(self.url) <= sqs.clock()
        super()._pause(0.0 if at_once else float(self._wait_seconds))

    def _tell(self, received: Any) -> None:
        self._brought += len(received.messages)
        super()._tell(received)

    def poll(self) -> tuple[int, float]:
        """Receive once if there is room. Return the number of messages, and seconds to pause."""
        self._window._cond.waits = 0
        self._stopped.pause_seconds = 0.0
        self._brought = 0
        with self._survives():
            self._poll()
        return self._brought, self._stopped.pause_seconds


class _NoObservation:
    """Replaces metrics, heartbeat and status, which need a port, a file or a store."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class _Parked(BaseException):
    """Raised where the loop of a thread would wait."""

    def __init__(self, condition: _Condition, seconds: float | None) -> None:
        self.condition, self.seconds = condition, seconds


class _Condition(threading.Condition):
    """Stops a thread's loop where it would wait, and lets it go on when it is notified."""

    waiter: _Thread | None = None
    is_over = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_over:
            raise _Parked(self, timeout)
        self.is_over = False
        return True

    def notify(self, n: int = 1) -> None:
        if self.waiter is not None:
            self.waiter.go_on_in(0.0)

    notify_all = notify


class _Thread:
    """Runs a thread's loop until it would wait. When the wait is over, starts the loop again."""

    def __init__(self, worker: Worker, name: str, run: Callable[[], object]) -> None:
        self._worker, self.name, self._run = worker, name, run
        self._waits_at: _Condition | None = None
        self._number = 0
        self.go_on_in(0.0)

    def is_alive(self) -> bool:
        return True

    def go_on_in(self, seconds: float) -> None:
        self._number += 1
        number = self._number
        self._worker.after(seconds, lambda: number == self._number and self._go_on())

    def _go_on(self) -> None:
        if self._waits_at is not None:
            self._waits_at.is_over = True
        try:
            self._run()
        except _Parked as parked:
            self._waits_at = parked.condition
            parked.condition.waiter = self
            if parked.seconds is not None:
                self.go_on_in(parked.seconds)


class Parts:
    """Gives the rig access to the parts of a worker."""

    def __init__(self, consumer: Any, worker: Worker) -> None:
        [self.step] = [each for each in consumer.steps if isinstance(each, step.LeaseStep)]
        self._consumer = consumer
        self._keeper: keeper.Keeper = self.step._keeper
        self._gates = providers = consumer.sqs_receiver.gates
        providers.rng = worker.rig.rng
        pacer = providers.pacer
        pacer._changed, pacer._wanted = _Condition(pacer._lock), _Condition(pacer._lock)
        self._room = room = consumer.sqs_receiver.window
        room._cond = _NeverWaits(room._cond._lock)

    # Calls to SQS

    def next_call(self) -> Any:
        """Return a call to SQS that is due now, or None."""
        return self._keeper.next_call()

    def next_at(self) -> float:
        """Return when a call to SQS may be due."""
        return self._keeper.next_at()

    def carry_out(self, call: Any) -> Any:
        return keeper.carry_out(call)

    def enter(self, call: Any, results: Any) -> None:
        self._keeper.enter(call, results)

    def break_provider(self, exc: Exception) -> None:
        def fail(*_: object) -> None:
            raise exc

        for gate in self._gates._gates.values():
            gate.ended = fail  # type: ignore[method-assign]

    def break_loss_notice(self, exc: Exception) -> None:
        def fail() -> None:
            raise exc

        for lease in self._keeper.held():
            lease.on_lost = fail

    # Shutdown

    def shut_down(self) -> None:
        """Shut down as a worker does when its pool has ended."""
        self.step.shutdown(self._consumer)

    def forget(self) -> None:
        """Unregister the worker's handler for the end of this process."""
        atexit.unregister(self.step.shutdown)

    # Facts

    @property
    def unconfirmed(self) -> int:
        """The number of settlements that SQS has not confirmed."""
        return self._keeper.waiting

    @property
    def held(self) -> set[str]:
        """The SQS message IDs of the messages that the worker holds."""
        return {lease.delivery.message_id for lease in self._keeper.held()}

    @property
    def places_taken(self) -> int:
        """The number of places of the prefetch window that are taken."""
        return len(self._room._held)

    def hear(self, tell: Callable[[Any], object]) -> None:
        """Call ``tell`` with each event of the worker."""
        self._keeper.events.subscribe(tell)


@contextmanager
def threads_replaced(rig: Rig) -> Iterator[None]:
    """During the block, build workers whose parts run in this thread and in virtual time."""
    replaced: list[tuple[Any, str, Any]] = [
        (step, "Keeper", lambda: _Keeper(rig.acting_worker)),
        (step, "Observation", _NoObservation),
        (step, "start_check_up", lambda *_: None),
        (step, "introduce", lambda *_: None),
        (step.upstream, "wake_event_loop", lambda hub: lambda: None),
        (receive, "Clients", lambda: _Clients(rig.acting_worker)),
        (receive, "Poller", lambda *args, **options: _Poller(rig.acting_worker, *args, **options)),
        (pacing, "start_daemon", lambda name, run: _Thread(rig.acting_worker, name, run)),
        (poller, "call_in_time", lambda call, seconds: call() or call),
        (upstream, "start_daemon", lambda name, run: run()),
        (window, "_LINGER_SECONDS", 0.0),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
