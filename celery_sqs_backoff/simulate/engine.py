"""The simulation: an event heap in virtual time, with the package's own policies and budgets.

SQS is simplified: a visible message goes at once to a random worker that has room; a hidden one is
shown at the second that was asked for. Nothing is lost and no clock differs: faults of SQS are the
subject of tests/simulation, load is the subject here.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any, TypeAlias

from ..retry.outcomes import Outcome
from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES, MAX_WAIT_TIME_SECONDS
from .measures import Call, Measures, Request
from .message import Message
from .provider import Provider
from .scenario import Scenario
from .strategies import Strategy, Told

__all__ = ["simulate"]


_Handler: TypeAlias = Callable[[Any, Any], None]


class _Worker:
    __slots__ = ("held", "is_free", "number", "paced", "running", "strategy", "ticks_at", "waiting")

    def __init__(self, number: int, strategy: Strategy) -> None:
        self.number = number
        self.strategy = strategy
        self.running = 0
        self.held = 0
        self.is_free = True
        self.waiting: deque[Message] = deque()  # for a process
        self.paced: deque[Message] = deque()  # for their turn
        self.ticks_at = math.inf


def simulate(
    scenario: Scenario, strategy: type[Strategy], *, seed: int = 0, max_messages: int | None = None
) -> Measures:
    """Run a scenario with one strategy.

    Args:
        scenario: what happens.
        strategy: how the fleet behaves.
        seed: the same seed gives the same result.
        max_messages: stop new messages after so many; ``None`` = no limit.
    """
    return _Simulation(scenario, strategy, seed, max_messages).run()


class _Simulation:
    def __init__(
        self, scenario: Scenario, strategy: type[Strategy], seed: int, max_messages: int | None
    ) -> None:
        self.scenario = scenario
        self.measures = Measures()
        self.rng = Random(seed)
        self._arrivals_rng = Random(seed + 2)  # the same arrivals for every strategy
        self.provider = Provider(scenario.script, Random(seed + 1))
        self.now = 0.0
        self._heap: list[tuple[float, int, _Handler, Any, Any]] = []
        self._sequence = count()
        self._visible: deque[Message] = deque()
        fleet = scenario.fleet
        self._capacity = fleet.processes * (1 + fleet.prefetch)
        self._processes = fleet.processes
        self._workers = [
            _Worker(n, strategy(scenario, Random(seed * 1000 + n + 3)))
            for n in range(fleet.workers)
        ]
        self._free = list(self._workers)
        self._max_messages = max_messages
        self._in_flight = 0
        self._alive = 0
        self._is_arriving = True
        self._older = 0
        self._recovered_at = scenario.script.recovered_at
        self._recovery_is_counted = False

    def run(self) -> Measures:
        arrivals, horizon = self.scenario.arrivals, self.scenario.horizon
        if arrivals.backlog and arrivals.oldest:
            for worker in self._workers:
                worker.strategy.down_since(-arrivals.oldest)
        for number in range(arrivals.backlog):
            self._arrive_from_before(arrivals.oldest * (1 - number / arrivals.backlog))
        self._schedule_arrival()
        heap, pop = self._heap, heapq.heappop
        while heap:
            at, _, handle, a, b = pop(heap)
            if at >= self._recovered_at and not self._recovery_is_counted:
                self._count_recovery()
            if horizon is not None and at > horizon:
                break
            self.now = at
            handle(a, b)
            if not self._alive and not self._is_arriving:
                break  # what is left are ends of holds that a recall has ended before
        if not self._recovery_is_counted:
            self._count_recovery()
        self.measures.ended_at = self.now
        idle_polls = self.now / MAX_WAIT_TIME_SECONDS * len(self._workers)
        self.measures.requests[Request.RECEIVE] += round(idle_polls)
        return self.measures

    # Messages

    def _schedule_arrival(self) -> None:
        arrivals = self.scenario.arrivals
        self._is_arriving = False
        if arrivals.rate <= 0:
            return
        if self._max_messages is not None and self.measures.messages >= self._max_messages:
            return
        at = self.now + self._arrivals_rng.expovariate(arrivals.rate)
        if at < arrivals.lasts:
            self._is_arriving = True
            self._push(at, self._on_arrival, None, None)

    def _on_arrival(self, a: None, b: None) -> None:
        self._arrive(self.now)
        self._schedule_arrival()

    def _arrive(self, now: float) -> None:
        self.measures.messages += 1
        self._alive += 1
        self._show(Message(self.measures.messages, now))

    def _arrive_from_before(self, age: float) -> None:
        """A message of the backlog: one that has been retried for its age is hidden now."""
        if not age:
            self._arrive(0.0)
            return
        self.measures.messages += 1
        self._alive += 1
        self._in_flight += 1
        message = Message(self.measures.messages, -age)
        strategy = self.rng.choice(self._workers).strategy
        seconds = strategy.has_retried(message)
        self.hide(message, seconds)
        strategy.hidden(message, seconds, 0.0)

    def _count_recovery(self) -> None:
        self._recovery_is_counted = True
        self._older = self.measures.backlog_at_recovery = self._alive
        if not self._alive:
            self.measures.drained_at = self._recovered_at

    def _settled(self, message: Message) -> None:
        self._alive -= 1
        self.measures.receives[message.receives] += 1
        if self._recovery_is_counted and message.sent_at <= self._recovered_at:
            self._older -= 1
            if not self._older:
                self.measures.drained_at = self.now

    # The queue

    def _show(self, message: Message) -> None:
        message.version += 1
        self._visible.append(message)
        self._hand_out()

    def _on_show(self, message: Message, version: int) -> None:
        if message.version == version:
            self._in_flight -= 1
            self._show(message)

    def hide(self, message: Message, seconds: float) -> None:
        """Keep a message in flight for some seconds from now."""
        message.version += 1
        self._push(self.now + seconds, self._on_show, message, message.version)

    def _hand_out(self) -> None:
        """Give visible messages to random workers that have room, up to ten in one request."""
        visible, free, measures = self._visible, self._free, self.measures
        while visible and free and self._in_flight < MAX_IN_FLIGHT_MESSAGES:
            index = int(self.rng.random() * len(free))
            worker = free[index]
            measures.requests[Request.RECEIVE] += 1
            batch = min(self._capacity - worker.held, MAX_BATCH_ENTRIES, len(visible))
            # A worker's poll takes its share: others that have room are polling as well.
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
        measures.in_flight_peak = max(measures.in_flight_peak, self._in_flight)

    def _receive(self, worker: _Worker, message: Message) -> None:
        message.receives += 1
        if message.first_received_at is None:
            message.first_received_at = self.now
        most = self.scenario.max_receive_count
        if most is not None and message.receives > most:
            self.measures.died("the queue's maxReceiveCount was passed", self.now)
            self._let_go(worker, message, is_settled=True)
            return
        told = worker.strategy.received(message, self.now, len(worker.paced))
        self._follow(worker, message, told)

    def _follow(self, worker: _Worker, message: Message, told: Told) -> None:
        if told.dead is not None:
            self.measures.died(told.dead, self.now)
            self.measures.requests[Request.SEND] += 1
            self.measures.requests[Request.DELETE] += 1
            self._let_go(worker, message, is_settled=True)
        elif told.hide is not None:
            self.measures.requests[Request.CHANGE_VISIBILITY] += 1
            self.hide(message, told.hide)
            worker.strategy.hidden(message, self.now + told.hide, self.now)
            self._wake(worker)
            worker.held -= 1
            self._has_room(worker)
        elif told.waits:
            worker.paced.append(message)
            self._wake(worker)
        else:
            worker.waiting.append(message)
            self._start(worker)

    def _let_go(self, worker: _Worker, message: Message, *, is_settled: bool) -> None:
        self._in_flight -= 1
        worker.held -= 1
        if is_settled:
            self._settled(message)
        self._has_room(worker)

    def _has_room(self, worker: _Worker) -> None:
        if not worker.is_free and worker.held < self._capacity:
            worker.is_free = True
            self._free.append(worker)

    # Runs

    def _start(self, worker: _Worker) -> None:
        while worker.waiting and worker.running < self._processes:
            message = worker.waiting.popleft()
            worker.running += 1
            message.runs += 1
            answer = self.provider.call(self.now)
            self.measures.called(answer.reply, self.now)
            self._push(self.now + answer.seconds, self._on_end, (worker, message), answer)

    def _on_end(self, where: tuple[_Worker, Message], answer: Any) -> None:
        worker, message = where
        worker.running -= 1
        if answer.reply is Call.SENT:
            worker.strategy.ended(message, None, self.now, None)
            self.measures.requests[Request.DELETE] += 1
            self._let_go(worker, message, is_settled=True)
        else:
            told = worker.strategy.ended(message, Outcome.RETRYABLE, self.now, answer.retry_after)
            self._follow(worker, message, told)
        self._wake(worker)
        self._start(worker)
        if self._visible:
            self._hand_out()

    # The provider's gate in each worker

    def _wake(self, worker: _Worker) -> None:
        seconds = worker.strategy.tick_seconds(self.now)
        if seconds is not None and self.now + seconds < worker.ticks_at:
            worker.ticks_at = self.now + seconds
            self._push(worker.ticks_at, self._on_tick, worker, worker.ticks_at)

    def _on_tick(self, worker: _Worker, at: float) -> None:
        if at != worker.ticks_at:
            return  # there was an earlier one since
        worker.ticks_at = math.inf
        self._take_turns(worker)
        # They may go to any worker: one that is full itself leaves the recalling to the others.
        room = 2 * self._capacity if worker.held < self._capacity else 0
        recalled = worker.strategy.recalls(self.now, room=room, waiting=len(worker.paced))
        if recalled:
            batches = -(-len(recalled) // MAX_BATCH_ENTRIES)
            self.measures.requests[Request.CHANGE_VISIBILITY] += batches
        for message in recalled:
            self._in_flight -= 1
            self._show(message)
        if self._alive:
            self._wake(worker)

    def _take_turns(self, worker: _Worker) -> None:
        """Let those run that have waited long enough for the provider's rate."""
        if not worker.paced:
            return
        for _ in range(worker.strategy.turns(len(worker.paced), self.now)):
            message = worker.paced.popleft()
            told = worker.strategy.turn_came(message, self.now, len(worker.paced))
            self._follow(worker, message, told)

    def _push(self, at: float, handle: _Handler, a: Any, b: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), handle, a, b))
