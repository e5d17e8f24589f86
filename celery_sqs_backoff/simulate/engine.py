"""Simulate a fleet in virtual time, with an event heap.

The simulated SQS is simpler than SQS. A random worker that has room receives a visible message
immediately. A hidden message is visible again exactly when its hide time ends. No message is lost,
and all clocks agree.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from random import Random
from typing import Any, TypeAlias

from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from .law import RUN, PolicyAlone, SimulatedDecision, SimulatedMessage
from .scenario import Scenario


class CallResult(Enum):
    """How a call to the provider ended."""

    SENT = "sent"
    WASTED = "wasted"
    TURNED_AWAY = "turned away"

    __hash__ = object.__hash__  # faster than Enum's hash, which is a Python call per count


@dataclass
class Measures:
    """The counts of one simulation. Times are seconds from its start.

    Attributes:
        messages: number of sent messages.
        calls: number of calls, by result and by the second in which they began.
        dead: number of messages that were given up, by reason.
        receives: number of settled messages, by their number of receives.
        in_flight_peak: largest number of messages in flight. SQS allows 120,000.
        backlog: number of unsettled messages at the end of the outage.
        ended_at: when the last message was settled.
    """

    messages: int = 0
    calls: dict[CallResult, Counter[int]] = field(
        default_factory=lambda: {call: Counter() for call in CallResult}
    )
    dead: Counter[str] = field(default_factory=Counter)
    receives: Counter[int] = field(default_factory=Counter)
    in_flight_peak: int = 0
    backlog: int = 0
    ended_at: float = 0.0


class SimulatedProvider:
    """Answers calls according to the scenario. Calls must be in the order of time."""

    def __init__(self, scenario: Scenario) -> None:
        self._outage = scenario.outage
        self._capacity = scenario.capacity
        self._most = max(1.0, scenario.capacity or 0.0)  # a burst of one second's calls
        self._tokens = self._most
        self._filled_at = 0.0

    def call(self, now: float) -> CallResult:
        """Return the result of a call that begins at the time ``now``."""
        if now < self._outage:
            return CallResult.WASTED
        if self._capacity is None:
            return CallResult.SENT
        self._tokens = min(self._most, self._tokens + (now - self._filled_at) * self._capacity)
        self._filled_at = now
        if self._tokens < 1:
            return CallResult.TURNED_AWAY
        self._tokens -= 1
        return CallResult.SENT


class _Worker:
    __slots__ = ("held", "is_free", "paced", "running", "strategy", "ticks_at", "waiting")

    def __init__(self, strategy: PolicyAlone) -> None:
        self.strategy = strategy
        self.running = 0
        self.held = 0
        self.is_free = True
        self.waiting: deque[SimulatedMessage] = deque()  # messages that wait for a process
        self.paced: deque[SimulatedMessage] = deque()  # messages that wait for a slot of the gate
        self.ticks_at = math.inf


def simulate(scenario: Scenario, strategy: type[PolicyAlone], *, seed: int = 0) -> Measures:
    """Run a scenario with one strategy. The same seed gives the same result."""
    return _Simulation(scenario, strategy, seed).run()


_Handler: TypeAlias = Callable[[Any, Any], None]


class _Simulation:
    def __init__(self, scenario: Scenario, strategy: type[PolicyAlone], seed: int) -> None:
        self.scenario = scenario
        self.measures = Measures()
        self.now = 0.0
        self._rng = Random(seed)
        self._arrivals_rng = Random(seed + 2)  # of its own: every strategy gets the same arrivals
        self._provider = SimulatedProvider(scenario)
        self._heap: list[tuple[float, int, _Handler, Any, Any]] = []
        self._sequence = count()
        self._visible: deque[SimulatedMessage] = deque()
        self._capacity = scenario.processes * (1 + scenario.prefetch)
        self._workers = [
            _Worker(strategy(scenario, Random(seed * 1000 + n + 3)))
            for n in range(scenario.workers)
        ]
        self._free = list(self._workers)
        self._in_flight = 0
        self._alive = 0
        self._is_arriving = True

    def run(self) -> Measures:
        for _ in range(self.scenario.backlog):
            self._show(self._make_message(0.0))
        self._push(self.scenario.outage, self._on_recovery, None, None)
        self._schedule_arrival()
        while self._heap and (self._alive or self._is_arriving):
            self.now, _, handle, a, b = heapq.heappop(self._heap)
            handle(a, b)
        self.measures.ended_at = self.now
        return self.measures

    # Messages

    def _schedule_arrival(self) -> None:
        rate = self.scenario.rate
        at = self.now + self._arrivals_rng.expovariate(rate) if rate else math.inf
        self._is_arriving = at < self.scenario.outage
        if self._is_arriving:
            self._push(at, self._on_arrival, None, None)

    def _on_arrival(self, a: None, b: None) -> None:
        self._show(self._make_message(self.now))
        self._schedule_arrival()

    def _on_recovery(self, a: None, b: None) -> None:
        self.measures.backlog = self._alive

    def _make_message(self, sent_at: float) -> SimulatedMessage:
        self.measures.messages += 1
        self._alive += 1
        return SimulatedMessage(self.measures.messages, sent_at)

    def _settle(self, worker: _Worker, message: SimulatedMessage, dead: str | None = None) -> None:
        if dead is not None:
            self.measures.dead[dead] += 1
        self._in_flight -= 1
        self._alive -= 1
        self.measures.receives[message.receives] += 1
        self._let_go(worker)

    # The queue

    def _show(self, message: SimulatedMessage) -> None:
        message.version += 1
        message.mark_shown()
        self._visible.append(message)
        self._hand_out()

    def _on_show(self, message: SimulatedMessage, version: int) -> None:
        if message.version == version:
            self._in_flight -= 1
            self._show(message)

    def _hide(self, message: SimulatedMessage, seconds: float) -> None:
        message.version += 1
        self._push(self.now + seconds, self._on_show, message, message.version)

    def _hand_out(self) -> None:
        """Give visible messages to random workers that have room, up to ten in one request."""
        visible, free = self._visible, self._free
        while visible and free and self._in_flight < MAX_IN_FLIGHT_MESSAGES:
            index = int(self._rng.random() * len(free))
            worker = free[index]
            batch = min(self._capacity - worker.held, MAX_BATCH_ENTRIES, len(visible))
            # Other workers with room poll at the same time, so one poll gets only its share.
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
        self.measures.in_flight_peak = max(self.measures.in_flight_peak, self._in_flight)

    def _receive(self, worker: _Worker, message: SimulatedMessage) -> None:
        message.receives += 1
        if message.first_received_at is None:
            message.first_received_at = self.now
        most = self.scenario.max_receive_count
        if most is not None and message.receives > most:
            self._settle(worker, message, dead="the queue's maxReceiveCount was passed")
            return
        told = worker.strategy.decide_on_receive(message, self.now, len(worker.paced))
        self._follow(worker, message, told)

    def _follow(self, worker: _Worker, message: SimulatedMessage, told: SimulatedDecision) -> None:
        if told.dead is not None:
            self._settle(worker, message, dead=told.dead)
        elif told.hide is not None:
            self._hide(message, told.hide)
            worker.strategy.note_hidden(message, self.now + told.hide, self.now)
            self._wake(worker)
            self._let_go(worker)
        elif told.waits:
            worker.paced.append(message)
            self._wake(worker)
        else:
            worker.waiting.append(message)
            self._start(worker)

    def _let_go(self, worker: _Worker) -> None:
        worker.held -= 1
        if not worker.is_free and worker.held < self._capacity:
            worker.is_free = True
            self._free.append(worker)

    # Runs

    def _start(self, worker: _Worker) -> None:
        while worker.waiting and worker.running < self.scenario.processes:
            message = worker.waiting.popleft()
            told = worker.strategy.decide_on_turn(message, self.now, len(worker.paced))
            if told is not RUN:
                self._follow(worker, message, told)
                continue
            worker.running += 1
            answer = self._provider.call(self.now)
            self.measures.calls[answer][int(self.now)] += 1
            self._push(
                self.now + self.scenario.call_seconds, self._on_end, (worker, message), answer
            )

    def _on_end(self, where: tuple[_Worker, SimulatedMessage], answer: CallResult) -> None:
        worker, message = where
        worker.running -= 1
        is_sent = answer is CallResult.SENT
        # A 429 counts as a refusal even without Retry-After.
        is_refused = answer is CallResult.TURNED_AWAY
        retry_after = (self.scenario.retry_after or 0.0) if is_refused else None
        told = worker.strategy.decide_after_run(
            message, self.now, failed=not is_sent, retry_after=retry_after
        )
        if is_sent:
            self._settle(worker, message)
        else:
            self._follow(worker, message, told)
        self._wake(worker)
        self._start(worker)
        if self._visible:
            self._hand_out()

    # The provider's gate in each worker

    def _wake(self, worker: _Worker) -> None:
        seconds = worker.strategy.tick_seconds()
        if seconds is not None and self.now + seconds < worker.ticks_at:
            worker.ticks_at = self.now + seconds
            self._push(worker.ticks_at, self._on_tick, worker, worker.ticks_at)

    def _on_tick(self, worker: _Worker, at: float) -> None:
        if at != worker.ticks_at:
            return  # an earlier wake-up has replaced this one
        worker.ticks_at = math.inf
        if worker.paced:
            for _ in range(worker.strategy.turns(len(worker.paced), self.now)):
                message = worker.paced.popleft()
                told = worker.strategy.decide_on_turn(message, self.now, len(worker.paced))
                self._follow(worker, message, told)
        # Any worker may receive recalled messages, so a full worker lets other workers recall them.
        room = 2 * self._capacity if worker.held < self._capacity else 0
        for message in worker.strategy.recalls(self.now, room=room, waiting=len(worker.paced)):
            self._in_flight -= 1
            self._show(message)
        if self._alive:
            self._wake(worker)

    def _push(self, at: float, handle: _Handler, a: Any, b: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), handle, a, b))
