"""The provider's side of a simulated worker: its gates, its recalls, and what must hold of them.

The gates are the worker's own, without their thread; a recall's calls take time, fail, and arrive
after their worker is gone. Rules, in the order of ``judge``:

7. A message is brought forward by the worker that hid it, while that hold is certain: not after
   its end, not if the call that hid it is in doubt, and never before the provider's Retry-After.
8. After enough failures of several messages nothing runs but one probe at a time, with pauses;
   not before all calls of a while have failed if the provider may be up.
9. A worker that finds the provider back brings forward all that it remembers.
10. A worker that stops leaves no message hidden for long that it could have brought nearer.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery_sqs_backoff import FullJitter, Outcome, Provider
from celery_sqs_backoff.provider.control import RECOVERY_LOOK_SECONDS
from celery_sqs_backoff.provider.health import State
from celery_sqs_backoff.provider.recall import Hidden
from celery_sqs_backoff.retry.decision import Ended, GiveUp, Hide, RetryIn
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.visibility import visibility_delay
from celery_sqs_backoff.worker.gates import Gates
from celery_sqs_backoff.worker.handover import LONGEST_SECONDS, batches
from celery_sqs_backoff.worker.lease import Lease
from celery_sqs_backoff.worker.lease import State as LeaseState
from celery_sqs_backoff.worker.recaller import Taken

from .history import RecallPoint

if TYPE_CHECKING:
    from .history import Fault
    from .world import Worker

__all__ = ["OPTIONS", "RecallJudge", "WorkerGates"]

#: Opens soon, and probes often: a history has few messages and little time.
PROVIDER = Provider("mail", failures=3, probe_interval=2.0, longest_probe_interval=10.0)
OPTIONS = Options(
    provider=PROVIDER,
    backoff=FullJitter(base=2, cap=200),
    retry_for=7_200.0,
    max_retries=200,
)
_SHORTEST_PAUSE_SECONDS = 0.75 * 2.0

#: All that a worker remembers is brought forward by then, if nothing fails.
_RECALLED_WITHIN_SECONDS = 40.0

#: What a stopping worker remembers comes back by then: ten messages a second.
_HANDED_OVER_WITHIN_SECONDS = 20.0


class WorkerGates(Gates):
    """The gates of a simulated worker: its threads are chains of events."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._sim = worker, worker.sim
        self._is_looking = self._is_pacing = False
        super().__init__(
            worker.keeper,
            calls=lambda url: Calls(self._sim.sqs, url),  # type: ignore[arg-type,return-value]
            room=self._room_of_worker,
            rng=random.Random(worker.number),
            today=self._sim.clock,
        )
        self.pacer._threads = 2 * [threading.current_thread()]  # none is started
        gate = self.of(PROVIDER)
        assert gate is not None
        self.gate = gate
        self.judge = RecallJudge(worker, self)

    def _room_of_worker(self) -> int:
        """As ``worker.messages.Receiver`` does."""
        if self._worker.is_stopping:
            return 0
        capacity = self._worker.capacity
        return 2 * capacity.startable_within(RECOVERY_LOOK_SECONDS)

    def keeps_back(self, lease: Lease, start: Callable[[], None]) -> bool:
        """As ``worker.strategy`` does, before a message is given to the pool."""
        if self.gate.hides(lease, OPTIONS):
            self._sim.judge.hidden(self._worker, lease)
            return True
        if self.gate.waits(lease, OPTIONS, start):
            if not self._is_pacing:
                self._is_pacing = True
                self._sim.after(0.0, self._pace, self._worker)
            return True
        self.judge.let_through(lease)
        return False

    def _pace(self) -> None:
        for action in self.pacer.step(self._sim.clock()):
            action()
        self._worker.pump()
        pause = self.pacer._pause()
        self._is_pacing = pause is not None
        if pause is not None:
            self._sim.after(pause, self._pace, self._worker)

    def settles(self, lease: Lease, ended: Ended, settle: Any) -> Any:
        """As ``worker.settler`` does: tell the gate, and ask it for the delay."""
        from dataclasses import replace

        self.judge.ended(lease, ended)
        was = self.gate.control.health.state
        self.gate.ended(lease, ended)
        if was is not State.CLOSED and self.gate.control.health.state is State.CLOSED:
            self.judge.closed()
        if not isinstance(settle, Hide):
            return settle
        seconds = self.gate.delayed(settle.seconds, lease, ended, OPTIONS)
        now = self._sim.clock()
        return replace(settle, seconds=visibility_delay(seconds, lease.delivery, now=now))

    # The thread

    def look_again(self, gate: Any) -> None:
        if not gate.control.is_quiet and not self._is_looking:
            self._is_looking = True
            self._sim.after(0.0, self._look, self._worker)

    def _look(self) -> None:
        self._send_next(self.recaller.recalls())

    def _send_next(self, batches: Iterator[tuple[str, list[Taken]]]) -> None:
        batch = next(batches, None)
        if batch is None:
            pause = self._pause()
            self._is_looking = pause is not None
            if pause is not None:
                self._sim.after(pause, self._look, self._worker)
            return
        url, taken = batch
        if self._sim.kills_in_recall(self._worker, RecallPoint.TAKEN):
            return
        fault = self._sim.fault_of("ChangeMessageVisibilityBatch", url)
        way = self._sim.way_of(fault)
        self._sim.after(way, lambda: self._arrive(url, taken, fault, way, batches), None)
        self._sim.kills_in_recall(self._worker, RecallPoint.SENT)

    def _arrive(
        self,
        url: str,
        taken: list[Taken],
        fault: Fault | None,
        way: float,
        batches: Iterator[tuple[str, list[Taken]]],
    ) -> None:
        handles = [each.hidden.handle for each in taken]
        for handle in handles:
            self.judge.recalled(url, handle, takes_effect=fault is None or fault.is_done)
        with self._sim.faulty("ChangeMessageVisibilityBatch", fault):
            results = self._calls(url).change_visibility([(handle, 0) for handle in handles])
        self._sim.kills_in_recall(self._worker, RecallPoint.ARRIVED)

        def answered() -> None:
            self.recaller.answered(taken, results)
            self._send_next(batches)

        self._sim.after(way, answered, self._worker)

    # The end

    def hand_over(self) -> None:
        """As ``Gates.hand_over`` does, whose threads make their calls side by side."""
        self.judge.stops()
        for url, entries in batches(self.gate.control.hand_over(self._sim.clock())):
            fault = self._sim.fault_of("ChangeMessageVisibilityBatch", url)
            arrive = functools.partial(self._hand_over, url, entries, fault)
            self._sim.after(self._sim.way_of(fault), arrive, None)

    def _hand_over(self, url: str, entries: list[tuple[str, int]], fault: Fault | None) -> None:
        for handle, seconds in entries:
            takes_effect = fault is None or fault.is_done
            self.judge.recalled(url, handle, takes_effect=takes_effect, seconds=seconds)
        with self._sim.faulty("ChangeMessageVisibilityBatch", fault):
            self._calls(url).change_visibility(entries)


class RecallJudge:
    """Watches the gates of one worker; says what is wrong to the simulation's judge.

    It has a gate of its own to compare with: failures in a row, and the calls under way.
    """

    def __init__(self, worker: Worker, gates: WorkerGates) -> None:
        self._worker, self._gates = worker, gates
        self._sim = worker.sim
        self._failed: deque[tuple[float, str]] = deque(maxlen=4)  # one more than opens the gate
        self._under_way: list[Lease] = []
        self._last_failure_at = self._paused_since = 0.0
        self._may_be_up_until = 0.0
        self._is_found_down = self._is_slowed = False
        self._probe: Lease | None = None
        self._closed_at = 0.0
        #: By handle: from when on a message may run.
        self._not_before: dict[str, float] = {}

    def _say(self, what: str) -> None:
        self._sim.judge._say(what)

    @property
    def _is_down(self) -> bool:
        return self._is_found_down and self._have_enough_failed()

    def _have_enough_failed(self) -> bool:
        now, failed = self._sim.clock(), self._failed
        is_recent = len(failed) == failed.maxlen and failed[0][0] > now - 290
        return is_recent and len({body for _, body in failed}) > 1

    def _note_failure(self, now: float, retry_after: float | None) -> None:
        """Find out whether the provider is down; it may be up, and is called slowly then."""
        was_slowed, is_slowed = self._is_slowed, self._gates.gate.control.admission.is_limiting
        self._is_slowed = is_slowed
        if is_slowed and not was_slowed:
            self._may_be_up_until = now + PROVIDER.thresholds.probe_interval
        if self._is_found_down or not self._have_enough_failed() or now < self._may_be_up_until:
            return
        if is_slowed or retry_after is None:
            self._is_found_down, self._paused_since = True, now

    def let_through(self, lease: Lease) -> None:
        """8: a message was not hidden."""
        under_way = [x for x in self._under_way if x.state is LeaseState.HELD]
        if self._is_down and not lease.delivery.is_last_before_sqs_moves_it:
            pause = self._sim.clock() - self._paused_since
            others = [x for x in under_way if x.body != lease.body and x.slot_at is not None]
            if others:
                self._say(f"{lease.body} runs beside the probe {others[0].body}")
            elif pause < _SHORTEST_PAUSE_SECONDS:
                self._say(f"{lease.body} runs {pause:.2f} s after the provider has failed")
            self._probe = lease
        self._under_way = [*under_way, lease]

    def ended(self, lease: Lease, ended: Ended) -> None:
        now = self._sim.clock()
        if lease in self._under_way:
            self._under_way.remove(lease)
        word = ended.word
        if word is None and ended.end.name == "RETURNED":
            self._failed.clear()
            self._is_found_down = False
            self._may_be_up_until = now + PROVIDER.thresholds.probe_interval
        elif isinstance(word, RetryIn | GiveUp) and word.outcome is Outcome.RETRYABLE:
            self._failed.append((now, lease.body))
            self._last_failure_at = now
            # A call that began before the gate opened may fail later: that is no reason to wait.
            if len(self._failed) <= PROVIDER.thresholds.failures or lease is self._probe:
                self._paused_since = now
            self._note_failure(now, getattr(word, "retry_after", None))
        if isinstance(word, RetryIn) and word.retry_after:
            self._not_before[lease.handle] = now + word.retry_after

    def recalled(self, url: str, handle: str, *, takes_effect: bool, seconds: float = 0.0) -> None:
        """7: a change of visibility to 0, or to some seconds, arrives."""
        queue, judge, now = self._sim.sqs.queues[url], self._sim.judge, self._sim.clock()
        message = queue.message_of(handle)
        fate = judge.fates[message.body]
        receipt = message.receipt
        judge.recalls += 1
        if message not in queue.messages:
            self._say(f"{message.body} is recalled although it is gone")
        elif receipt is None or receipt.handle != handle or now >= message.visible_at:
            self._say(f"{message.body} is recalled although its hold has ended")
        if handle in judge.in_doubt:
            self._say(f"{message.body} is recalled although its hold is in doubt")
        if now + seconds < self._not_before.get(handle, 0.0):
            self._say(f"{message.body} is recalled before the provider's Retry-After")
        if takes_effect:
            fate.due_at = min(fate.due_at, now + seconds)

    def closed(self) -> None:
        """9: the provider is back."""
        self._closed_at = closed_at = self._sim.clock()
        if self._sim.is_calm():
            self._sim.after(_RECALLED_WITHIN_SECONDS, lambda: self._look_back(closed_at), None)

    def _look_back(self, closed_at: float) -> None:
        has_failed = self._last_failure_at > closed_at or self._closed_at > closed_at
        control = self._gates.gate.control
        waiting = [
            each
            for each in control.memory
            if each.until > closed_at + 2 * _RECALLED_WITHIN_SECONDS and each.not_before < closed_at
        ]
        is_at_work = self._worker.is_alive and not self._worker.is_stopping
        if is_at_work and not has_failed and waiting:
            self._say(f"{len(waiting)} messages still wait for their recall")

    def stops(self) -> None:
        """10: the worker is about to hand over what it remembers."""
        now, control = self._sim.clock(), self._gates.gate.control
        is_down = control.health.state is not State.CLOSED
        self._sim.judge.stops += 1
        held = [
            each
            for each in control.memory
            if not control.is_quiet
            and each.until > max(now, each.not_before) + _HANDED_OVER_WITHIN_SECONDS + 60.0
            and not (is_down and each.next_is_last)
        ]
        if self._sim.is_calm():
            self._sim.after(LONGEST_SECONDS, lambda: self._look_at_hidden(held, now), None)

    def _look_at_hidden(self, held: list[Hidden], stopped_at: float) -> None:
        for hidden in held:
            messages = self._sim.sqs.queues[hidden.queue].messages
            message = next((m for m in messages if m.id == hidden.message_id), None)
            if message is None or message.receipt is None:
                continue
            latest = max(stopped_at, hidden.not_before) + _HANDED_OVER_WITHIN_SECONDS
            if message.receipt.handle == hidden.handle and message.visible_at > latest:
                self._say(f"{message.body} is left hidden by a worker that stops")
