"""Simulate a fleet of workers in virtual time, with a heap of events.

The simulated SQS is simpler than SQS. If a worker has room, it receives a visible message
immediately. If several have room, one of them is drawn. A hidden message is visible again exactly
when its hold ends. No message is lost, and all clocks agree.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Final

from ..provider.gate import ProviderGate
from ..retry.decision import Reply
from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from .law import RUN, Law, SimulatedDecision, SimulatedMessage
from .results import Result
from .scenario import Scenario

#: Names of the strategies, and whether the strategy's task has a provider, and so a gate.
STRATEGIES: Final = {"full-jitter": False, "provider": True}


class SimulatedProvider:
    """Answers calls according to the scenario. The times of calls must not decrease."""

    def __init__(self, scenario: Scenario) -> None:
        self._outage = scenario.outage
        self._capacity = scenario.capacity
        self._most = max(1.0, scenario.capacity or 0.0)  # a burst of one second's calls
        self._tokens = self._most
        self._filled_at = 0.0

    def call(self, now: float) -> Reply:
        """Return the reply to a call that begins at the time ``now``."""
        if now < self._outage:
            return Reply.FAILED
        if self._capacity is None:
            return Reply.ANSWERED
        self._tokens = min(self._most, self._tokens + (now - self._filled_at) * self._capacity)
        self._filled_at = now
        if self._tokens < 1:
            return Reply.REFUSED
        self._tokens -= 1
        return Reply.ANSWERED


class SimulatedWorker:
    """One worker, with the messages that it holds."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.running = 0
        self.held = 0
        self.is_free = True
        self.waiting: deque[SimulatedMessage] = deque()  # messages that wait for a process
        self.paced: deque[SimulatedMessage] = deque()  # messages that wait for a slot of the gate
        self.ticks_at = math.inf


def simulate(scenario: Scenario, strategy: str, *, seed: int = 0) -> Result:
    """Run a scenario with one of ``STRATEGIES``. The same seed gives the same result."""
    return _Simulation(scenario, strategy, seed).run()


class _Simulation:
    def __init__(self, scenario: Scenario, strategy: str, seed: int) -> None:
        self.scenario = scenario
        self.result = Result(strategy, scenario)
        self.now = 0.0
        self._rng = Random(seed)
        self._arrivals_rng = Random(seed + 2)  # a second one: all strategies get the same arrivals
        self._provider = SimulatedProvider(scenario)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = count()
        self._visible: deque[SimulatedMessage] = deque()
        self._capacity = scenario.processes * (1 + scenario.prefetch)
        self._free = [
            SimulatedWorker(
                Law(scenario, Random(seed * 1000 + n + 3), has_gate=STRATEGIES[strategy])
            )
            for n in range(scenario.workers)
        ]
        self._in_flight = 0
        self._alive = 0
        self._is_arriving = True

    def run(self) -> Result:
        for _ in range(self.scenario.backlog):
            self._send()
        self._push(self.scenario.outage, self._on_recovery)
        self._schedule_arrival()
        while self._heap and (self._alive or self._is_arriving):
            self.now, _, handle, arguments = heapq.heappop(self._heap)
            handle(*arguments)
        self.result.ended_at = self.now
        return self.result

    def _push(self, at: float, handle: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), handle, arguments))

    # Messages

    def _schedule_arrival(self) -> None:
        rate = self.scenario.rate
        at = self.now + self._arrivals_rng.expovariate(rate) if rate else math.inf
        self._is_arriving = at < self.scenario.outage
        if self._is_arriving:
            self._push(at, self._on_arrival)

    def _on_arrival(self) -> None:
        self._send()
        self._schedule_arrival()

    def _on_recovery(self) -> None:
        self.result.backlog = self._alive

    def _send(self) -> None:
        self.result.messages += 1
        self._alive += 1
        self._show(SimulatedMessage(self.result.messages, self.now))

    def _settle(self, worker: SimulatedWorker, message: SimulatedMessage) -> None:
        self._in_flight -= 1
        self._alive -= 1
        self.result.receives[message.receives] += 1
        self._let_go(worker)

    # The queue

    def _show(self, message: SimulatedMessage) -> None:
        message.version += 1
        if message.recall is not None:
            message.recall.among.discard(message)
        self._visible.append(message)
        self._hand_out()

    def _on_show(self, message: SimulatedMessage, version: int) -> None:
        if message.version == version:
            self._in_flight -= 1
            self._show(message)

    def _hand_out(self) -> None:
        """Give visible messages to random workers that have room, up to ten in one receive."""
        visible, free = self._visible, self._free
        while visible and free and self._in_flight < MAX_IN_FLIGHT_MESSAGES:
            index = int(self._rng.random() * len(free))
            worker = free[index]
            batch = min(self._capacity - worker.held, MAX_BATCH_ENTRIES, len(visible))
            # Other workers with room receive at the same time, so one worker gets only its share.
            if len(visible) < len(free) * batch:
                batch = max(1, min(batch, len(visible) // len(free)))
            for _ in range(batch):
                worker.held += 1
                self._in_flight += 1
                self._receive(worker, visible.popleft())
            if worker.held >= self._capacity and free[index] is worker:
                worker.is_free = False
                free[index] = free[-1]
                free.pop()
        self.result.in_flight_peak = max(self.result.in_flight_peak, self._in_flight)

    def _receive(self, worker: SimulatedWorker, message: SimulatedMessage) -> None:
        message.receives += 1
        if message.first_received_at is None:
            message.first_received_at = self.now
        most = self.scenario.max_receive_count
        if most is not None and message.receives > most:
            told = SimulatedDecision(dead="the queue's maxReceiveCount was passed")
        else:
            told = worker.law.decide_on_receive(message, self.now, len(worker.paced))
        self._follow(worker, message, told)

    def _follow(
        self, worker: SimulatedWorker, message: SimulatedMessage, told: SimulatedDecision
    ) -> None:
        if told.dead is not None:
            self.result.dead[told.dead] += 1
            self._settle(worker, message)
        elif told.hide is not None:
            until, message.recall = self.now + told.hide, told.recall
            message.version += 1
            self._push(until, self._on_show, message, message.version)
            if told.recall is not None:
                told.recall.among.add(message, until, told.recall, self.now)
            self._wake(worker)
            self._let_go(worker)
        elif told.waits:
            worker.paced.append(message)
            self._wake(worker)
        else:
            worker.waiting.append(message)
            self._start(worker)

    def _let_go(self, worker: SimulatedWorker) -> None:
        worker.held -= 1
        if not worker.is_free and worker.held < self._capacity:
            worker.is_free = True
            self._free.append(worker)

    # Runs

    def _start(self, worker: SimulatedWorker) -> None:
        while worker.waiting and worker.running < self.scenario.processes:
            message = worker.waiting.popleft()
            told = worker.law.decide_on_turn(message, self.now, len(worker.paced))
            if told is not RUN:
                self._follow(worker, message, told)
                continue
            worker.running += 1
            reply = self._provider.call(self.now)
            self.result.calls[reply][int(self.now)] += 1
            self._push(self.now + self.scenario.call_seconds, self._on_end, worker, message, reply)

    def _on_end(self, worker: SimulatedWorker, message: SimulatedMessage, reply: Reply) -> None:
        worker.running -= 1
        # A 429 counts as a refusal even without Retry-After.
        retry_after = self.scenario.retry_after if reply is Reply.REFUSED else None
        told = worker.law.decide_after_run(message, self.now, reply, retry_after)
        if reply is Reply.ANSWERED:
            self._settle(worker, message)
        else:
            self._follow(worker, message, told)
        self._wake(worker)
        self._start(worker)
        if self._visible:
            self._hand_out()

    # The provider's gate in each worker

    def _wake(self, worker: SimulatedWorker) -> None:
        seconds = None if worker.law.gate is None else worker.law.gate.seconds_to_look
        if seconds is not None and self.now + seconds < worker.ticks_at:
            worker.ticks_at = self.now + seconds
            self._push(worker.ticks_at, self._on_tick, worker, worker.law.gate, worker.ticks_at)

    def _on_tick(self, worker: SimulatedWorker, gate: ProviderGate, at: float) -> None:
        if at != worker.ticks_at:
            return  # the worker has planned an earlier tick in its place
        worker.ticks_at = math.inf
        if worker.paced:
            for _ in range(gate.turns(len(worker.paced), self.now)):
                message = worker.paced.popleft()
                told = worker.law.decide_on_turn(message, self.now, len(worker.paced))
                self._follow(worker, message, told)
        # Any worker may receive the messages that this one brings forward. A full worker leaves
        # this to other workers.
        room = 2 * self._capacity if worker.held < self._capacity else 0
        for message in gate.recalls(self.now, room=room, waiting=len(worker.paced)):
            self._in_flight -= 1
            self._show(message)
        if self._alive:
            self._wake(worker)
