"""Simulate a fleet of workers in virtual time, with a heap of events.

The simulated SQS is simpler than SQS. A worker with room for a message receives a visible message
immediately. If several workers have room, one of these workers is drawn at random. A hidden message
is visible again exactly when its hold ends. A hold is the time for which SQS hides a message. No
message is lost, and all clocks agree.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Final

from ..provider.gate import ProviderGate
from ..retry.budget import GiveUpReason
from ..retry.decision import Reply
from ..sqs.delivery import Delivery
from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from .results import Result
from .scenario import Scenario
from .worker import RUN, Decision, SimulatedMessage, SimulatedWorker

#: For each strategy, whether the task has a provider, and so a gate (circuit breaker).
STRATEGIES: Final = {"full-jitter": False, "provider": True}


class SimulatedProvider:
    """Answers calls according to the scenario. The times of calls must not decrease."""

    def __init__(self, scenario: Scenario) -> None:
        self._outage, self._capacity = scenario.outage, scenario.capacity
        self._most = self._tokens = max(1.0, scenario.capacity)  # a burst of one second's calls
        self._filled_at = 0.0

    def call(self, now: float) -> Reply:
        """Return the reply to a call that begins at the time ``now``."""
        if now < self._outage:
            return Reply.FAILED
        self._tokens = min(self._most, self._tokens + (now - self._filled_at) * self._capacity)
        self._filled_at = now
        if self._tokens < 1:
            return Reply.REFUSED
        self._tokens -= 1
        return Reply.ANSWERED


def simulate(scenario: Scenario, strategy: str, *, seed: int = 0) -> Result:
    """Run a scenario with one of ``STRATEGIES``. The same seed gives the same result."""
    return _Simulation(scenario, strategy, seed).run()


class _Simulation:
    def __init__(self, scenario: Scenario, strategy: str, seed: int) -> None:
        self.scenario = scenario
        self.result = Result(strategy, scenario)
        self.now = 0.0
        self._rng = Random(seed)
        self._provider = SimulatedProvider(scenario)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = count()
        self._visible: deque[SimulatedMessage] = deque()
        self._workers = [
            SimulatedWorker(scenario, Random(seed * 1000 + n + 3), has_gate=STRATEGIES[strategy])
            for n in range(scenario.workers)
        ]
        self._in_flight = self._alive = 0

    def run(self) -> Result:
        for _ in range(self.scenario.backlog):
            self._push(0.0, self._send)
        # All arrivals are drawn before the first event, so that they are the same with all
        # strategies.
        rate, at = self.scenario.rate, 0.0
        while rate and (at := at + self._rng.expovariate(rate)) < self.scenario.outage:
            self._push(at, self._send)
        self._push(self.scenario.outage, self._on_recovery)
        while self._heap:
            self.now, _, handle, arguments = heapq.heappop(self._heap)
            handle(*arguments)
        return self.result

    def _push(self, at: float, handle: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), handle, arguments))

    # Messages

    def _on_recovery(self) -> None:
        self.result.backlog = self._alive

    def _send(self) -> None:
        self.result.messages += 1
        self._alive += 1
        delivery = Delivery(
            message_id=str(self.result.messages),
            queue_url="",
            received_at=self.now,
            receive_count=0,
            max_receive_count=self.scenario.max_receive_count,
        )
        self._visible.append(SimulatedMessage(delivery))
        self._hand_out()

    def _settle(self, worker: SimulatedWorker, message: SimulatedMessage) -> None:
        worker.room += 1
        self._in_flight -= 1
        self._alive -= 1
        self.result.receives[message.delivery.receive_count] += 1
        self.result.ended_at = self.now

    # The queue

    def _hide(self, message: SimulatedMessage, seconds: float) -> None:
        message.hidden_until = until = self.now + seconds
        if message.recall is not None:
            message.recall.among.add(message, until, message.recall, self.now)
        self._push(until, self._on_hold_ended, message)

    def _on_hold_ended(self, message: SimulatedMessage) -> None:
        if message.hidden_until == self.now:  # else a worker has brought it forward
            self._show(message)

    def _show(self, message: SimulatedMessage) -> None:
        message.hidden_until = None
        if message.recall is not None:
            message.recall.among.discard(message)
        self._in_flight -= 1
        self._visible.append(message)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give visible messages to random workers that have room, up to ten in one receive."""
        while self._visible and self._in_flight < MAX_IN_FLIGHT_MESSAGES:
            free = [worker for worker in self._workers if worker.room]
            if not free:
                break
            worker = self._rng.choice(free)
            # Other workers with room receive at the same time, so a worker gets only its share.
            share = max(1, len(self._visible) // len(free))
            for _ in range(min(worker.room, MAX_BATCH_ENTRIES, share)):
                self._receive(worker, self._visible.popleft())
        self.result.in_flight_peak = max(self.result.in_flight_peak, self._in_flight)

    def _receive(self, worker: SimulatedWorker, message: SimulatedMessage) -> None:
        worker.room -= 1
        self._in_flight += 1
        last = message.delivery
        message.delivery = replace(
            last,
            received_at=self.now,
            receive_count=last.receive_count + 1,
            first_received_at=last.first_received_at if last.receive_count else self.now,
        )
        self._follow(worker, message, worker.decide_on_receive(message, self.now))

    # The workers

    def _follow(
        self, worker: SimulatedWorker, message: SimulatedMessage, decision: Decision
    ) -> None:
        if isinstance(decision, GiveUpReason):
            self.result.dead[decision.value] += 1
            self._settle(worker, message)
        elif decision.hide_seconds is not None:
            worker.room += 1
            message.recall = decision.recall
            seconds = message.delivery.visibility_delay(decision.hide_seconds, now=self.now)
            self._hide(message, seconds)
        elif decision.waits:
            worker.paced.append(message)
        else:
            worker.waiting.append(message)
            self._start(worker)
        self._wake(worker)

    def _start(self, worker: SimulatedWorker) -> None:
        while worker.waiting and worker.running < self.scenario.processes:
            message = worker.waiting.popleft()
            decision = worker.decide_on_turn(message, self.now)
            if decision != RUN:
                self._follow(worker, message, decision)
                continue
            worker.running += 1
            reply = self._provider.call(self.now)
            self.result.calls[reply][int(self.now)] += 1
            self._push(self.now + self.scenario.call_seconds, self._on_end, worker, message, reply)

    def _on_end(self, worker: SimulatedWorker, message: SimulatedMessage, reply: Reply) -> None:
        worker.running -= 1
        decision = worker.decide_after_run(message, self.now, reply)
        if decision is None:
            self._settle(worker, message)
        else:
            self._follow(worker, message, decision)
        self._wake(worker)
        self._start(worker)
        self._hand_out()

    def _wake(self, worker: SimulatedWorker) -> None:
        """Plan the next tick of a worker, unless an earlier tick is planned.

        At a tick, the worker's gate lets waiting messages run and brings hidden messages forward.
        """
        seconds = None if worker.gate is None else worker.gate.seconds_to_look
        if seconds is not None and self.now + seconds < worker.ticks_at:
            worker.ticks_at = self.now + seconds
            self._push(worker.ticks_at, self._on_tick, worker, worker.gate)

    def _on_tick(self, worker: SimulatedWorker, gate: ProviderGate) -> None:
        if worker.ticks_at != self.now:
            return  # the worker has planned an earlier tick in its place
        worker.ticks_at = math.inf
        if worker.paced:
            for _ in range(gate.turns(len(worker.paced), self.now)):
                message = worker.paced.popleft()
                decision = worker.decide_on_turn(message, self.now)
                self._follow(worker, message, decision)
        # To bring a message forward is to show it before its hold ends. Any worker may receive the
        # message, so a worker may bring forward more messages than it can hold. A worker without
        # room leaves this to other workers.
        room = 2 * self.scenario.window if worker.room else 0
        for message in gate.recalls(self.now, room=room, waiting=len(worker.paced)):
            self._show(message)
        if self._alive:
            self._wake(worker)
