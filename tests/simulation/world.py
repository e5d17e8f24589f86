"""Workers and SQS in virtual time: calls take time, fail, and are answered out of order.

Each worker is the real keeper (its table, leases and memory) without its threads,
the real arithmetic of its poller and the real decision at the end of a run, around a pool of four
processes. SQS is the strict fake. What may go wrong is judged in ``judge``.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

from celery_sqs_backoff.retry.budget import exhausted_before_run
from celery_sqs_backoff.retry.decision import (
    Delete,
    End,
    Ended,
    Facts,
    GiveBack,
    Hide,
    decide,
    word_for,
)
from celery_sqs_backoff.retry.outcomes import Outcome, Verdict
from celery_sqs_backoff.sqs.calls import RECEIVE_ATTRIBUTES, Calls
from celery_sqs_backoff.sqs.carry_out import carry_out
from celery_sqs_backoff.sqs.queues import read_queue
from celery_sqs_backoff.sqs.settlement import Call
from celery_sqs_backoff.sqs.visibility import standing, visibility_delay
from celery_sqs_backoff.worker import keeper as keeper_module
from celery_sqs_backoff.worker.capacity import Capacity
from celery_sqs_backoff.worker.handover import LONGEST_SECONDS
from celery_sqs_backoff.worker.lease import Lease, State

from ..support import fake_sqs
from ..support.fake_sqs import Clock, FakeSQS
from ..support.leases import lease_on, some_record
from .history import (
    TROUBLE_SECONDS,
    Down,
    Fault,
    History,
    Kill,
    KillInRecall,
    RecallPoint,
    Send,
    Stall,
    Step,
    Stop,
)
from .judge import Judge
from .provider import OPTIONS, WorkerGates

__all__ = ["Simulation", "Worker", "run"]

#: One way to SQS, or back.
_WAY_SECONDS = 0.01
_SLOW_WAY_SECONDS = 4.0
_PROCESSES = 4
#: A call to a provider that is down, and the delay after it.
_FAILED_SECONDS = 0.3
_FAILED_DELAY_SECONDS = 20.0
_PREFETCH_MULTIPLIER = 3
#: The task's budgets.
_MAX_RETRIES = 200
_RETRY_FOR_SECONDS = 7_200.0
_CRASH_BUDGET = 3
#: Between two polls while there are messages that nobody has taken.
_BACKLOG_SECONDS = 0.5
#: A stopping worker looks so often whether it is done, and settles for so long at the most.
_LOOK_SECONDS = 0.1
_FLUSH_SECONDS = 15.0
#: A history that has not ended by then never will.
_LAST_SECONDS = 60_000.0
_MAX_EVENTS = 60_000

_ERRORS: dict[str, str | Exception] = {
    "unreachable": EndpointConnectionError(endpoint_url="x"),
    "lost response": ReadTimeoutError(endpoint_url="x"),
    "throttled": "RequestThrottled",
    "internal error": "InternalError",
    "expired token": "ExpiredToken",
    "denied": "AccessDenied",
    "runtime error": RuntimeError("refreshed, but still expired"),
}


_ENDS = {"success": End.RETURNED, "release": End.CANCELLED, "crash": End.PROCESS_LOST}


class Worker:
    """A worker without threads: whatever it does is an event of the simulation."""

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.number = sim, number
        self.keeper = keeper_module.Keeper(clock=sim.clock, rng=random.Random(number))
        self.capacity = Capacity(
            processes=lambda: _PROCESSES,
            multiplier=lambda: _PREFETCH_MULTIPLIER,
            is_behind=lambda: self.keeper.is_behind,
            clock=sim.clock,
        )
        self.is_alive, self.is_stopping = True, False
        self.stalled_until = -math.inf
        self.running: set[Lease] = set()
        self.waiting: list[Lease] = []
        self.held: set[Lease] = set()
        self.leases: list[Lease] = []
        self.gates = WorkerGates(self) if sim.history.has_provider else None
        self._wakes_at = math.inf
        for queue in range(len(sim.urls)):
            sim.after(0.0, lambda queue=queue: self.poll(queue), self)

    # Receiving

    def poll(self, queue: int) -> None:
        if self.is_stopping:
            return
        url = self.sim.urls[queue]
        asked_for = self.capacity._load(url).wanted
        if self.gates is not None and asked_for > 0:
            asked_for = min(asked_for, self.gates.most_to_receive(url))
        if self.sim.queues[queue].is_fifo:
            asked_for = min(asked_for, 1)
        if asked_for > 0:
            self.capacity._reserve(url, asked_for)
            response = self.sim.sqs.receive_message(
                QueueUrl=url,
                MaxNumberOfMessages=asked_for,
                WaitTimeSeconds=20,
                **RECEIVE_ATTRIBUTES,
            )
            messages = response.get("Messages", [])
            for message in messages:
                self.sim.judge.received(self, message)
                if self.gates is not None:
                    self.gates.mix.note(url, self.sim.queues[queue].name, OPTIONS.provider.name)
            take = functools.partial(self._take, queue, messages, asked_for)
            self.sim.after(_WAY_SECONDS, take, self)
        self.sim.after(self.sim.next_message_in(queue), lambda: self.poll(queue), self)

    def _take(self, queue: int, messages: list[dict[str, Any]], asked_for: int) -> None:
        """As ``worker.messages.Receiver`` does."""
        url = self.sim.urls[queue]
        for message in messages:
            lease = self._lease(queue, message)
            self.capacity.received(lease.handle)
            self.keeper.hold(lease)
            if not self.keeper.recognise(lease):
                self._starter(lease)()
        self.capacity.responded(url, asked_for=asked_for, messages=len(messages), seconds=0.02)
        self.pump()

    def _lease(self, queue: int, message: dict[str, Any]) -> Lease:
        facts = self.sim.queues[queue]
        lease = lease_on(
            message,
            queue=facts,
            calls=Calls(self.sim.sqs, facts.url),  # type: ignore[arg-type]
            keeper=self.keeper,
            now=self.sim.clock(),
            free=lambda: self._free(lease, message["ReceiptHandle"]),
        )
        lease.handed_to_pool = lambda: lease in self.running
        lease.on_lost = lambda: self.sim.judge.told(self, lease)
        self.held.add(lease)
        self.leases.append(lease)
        return lease

    def _free(self, lease: Lease, tag: str) -> None:
        self.held.discard(lease)
        self.capacity.freed(tag)

    def _starter(self, lease: Lease) -> Callable[[], None]:
        def start() -> None:
            if self.is_stopping:
                lease.give_back()
                return
            if self.gates is not None and self.gates.keeps_back(lease, start):
                return
            self.waiting.append(lease)
            self._start_some()

        return start

    def _start_some(self) -> None:
        while self.waiting and len(self.running) < _PROCESSES:
            lease = self.waiting.pop(0)
            if lease.state is not State.HELD:
                continue
            if self._is_exhausted(lease):
                self._settle(lease, Ended(End.REFUSED), 0.0)
                continue
            self.sim.judge.started(self, lease)
            self.running.add(lease)
            self.capacity.started(lease.handle)
            how, seconds, delay = self.sim.next_run(lease.body)
            end = functools.partial(self._end, lease, how, delay, self.sim.retry_after())
            self.sim.after(seconds, end, self)

    def _is_exhausted(self, lease: Lease) -> bool:
        reason = exhausted_before_run(
            self._standing(lease),
            max_retries=_MAX_RETRIES,
            retry_for=_RETRY_FOR_SECONDS,
            crashes=self.keeper.memory.crashes(lease.delivery.message_id),
            crash_budget=_CRASH_BUDGET,
        )
        return reason is not None

    def _standing(self, lease: Lease) -> Any:
        delivery = lease.delivery
        return standing(delivery, retries=delivery.earlier_runs, now=self.sim.clock())

    def _end(self, lease: Lease, how: str, delay: float, retry_after: float | None) -> None:
        if how in ("retry", "give up"):
            outcome = Outcome.RETRYABLE if how == "retry" else Outcome.UNKNOWN
            verdict = Verdict(outcome, retry_after)
            delay += retry_after or 0.0
            word = word_for(
                verdict,
                self._standing(lease),
                max_retries=_MAX_RETRIES,
                retry_for=_RETRY_FOR_SECONDS,
                delay=delay,
            )
            ended = Ended(End.RAISED, word)
        else:
            ended = Ended(_ENDS[how])
        self.running.discard(lease)
        self._settle(lease, ended, delay)
        self._start_some()
        self.pump()

    def _settle(self, lease: Lease, ended: Ended, delay: float) -> None:
        """As ``worker.settler.Settler`` does."""
        crashes = 0
        if ended.end is End.PROCESS_LOST:
            crashes = self.keeper.memory.count_crash(lease.delivery.message_id)
        facts = Facts(
            standing=self._standing(lease),
            max_retries=_MAX_RETRIES,
            retry_for=_RETRY_FOR_SECONDS,
            crash_budget=_CRASH_BUDGET,
            crashes=crashes,
            delay=delay,
        )
        settle = decide(ended, facts)
        if self.gates is not None:
            settle = self.gates.settles(lease, ended, settle)
        self.sim.judge.ended(self, lease, ended, settle)
        if isinstance(settle, Delete):
            lease.done()
        elif isinstance(settle, GiveBack):
            lease.release()
        elif isinstance(settle, Hide):
            lease.defer(visibility_delay(settle.seconds, lease.delivery, now=self.sim.clock()))
        else:
            lease.dead_letter(some_record(self.sim.clock()))

    # Stopping

    def stop(self) -> None:
        """As a warm shutdown does: give back what has not started, let the others end."""
        if self.is_stopping:
            return
        self.is_stopping = True
        for lease in list(self.held):
            if lease not in self.running:
                lease.give_back()
        self.pump()
        self._end_if_settled(math.inf)

    def _end_if_settled(self, latest: float) -> None:
        """As ``worker.step`` does: settle for a while, then hand over."""
        now = self.sim.clock()
        if not self.running:
            latest = min(latest, now + _FLUSH_SECONDS)
        if self.running or (self.keeper.waiting and now < latest):
            self.sim.after(_LOOK_SECONDS, lambda: self._end_if_settled(latest), self)
            return
        if self.gates is not None:
            self.gates.hand_over()
        self.sim.after(LONGEST_SECONDS, lambda: self.sim.replace(self), self)

    # Calls

    def pump(self) -> None:
        """Send off the calls that are due, and wake up for the next."""
        while (call := self.keeper.next_call()) is not None:
            self.sim.send_off(self, call)
        at = self.keeper.next_at()
        now = self.sim.clock()
        if at < self._wakes_at or self._wakes_at <= now:
            self._wakes_at = max(at, now)
            if at < math.inf:
                self.sim.after(max(0.0, at - now), self._wake, self)

    def _wake(self) -> None:
        self._wakes_at = math.inf
        self.pump()


class Simulation:
    """SQS, the workers, and the events to come."""

    def __init__(self, history: History) -> None:
        self.clock = Clock()
        self.begins_at = self.clock.now
        self.sqs = FakeSQS(self.clock)
        self.history = history
        self._events: list[tuple[float, int, Callable[[], object], Worker | None]] = []
        self._count = itertools.count()
        self.judge = Judge(self)
        self.urls: list[str] = []
        for spec in history.queues:
            end = ".fifo" if spec.fifo else ""
            kind = {"MessageRetentionPeriod": "1209600"}
            if spec.fifo:
                kind |= {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
            dlq = self.sqs.create_queue(QueueName=f"{spec.name}-dlq{end}", Attributes=kind)
            policy = {
                "deadLetterTargetArn": self.sqs.queues[dlq["QueueUrl"]].arn,
                "maxReceiveCount": spec.max_receive_count,
            }
            kind |= {
                "VisibilityTimeout": str(spec.visibility_timeout),
                "RedrivePolicy": json.dumps(policy),
            }
            made = self.sqs.create_queue(QueueName=f"{spec.name}{end}", Attributes=kind)
            self.urls.append(made["QueueUrl"])
            self.sqs.queues[self.urls[-1]].on_gone = self.judge.gone
        self.queues = [read_queue(Calls(self.sqs, url), url) for url in self.urls]  # type: ignore[arg-type]
        self.faults = [step for step in history.steps if isinstance(step, Fault)]
        self._runs: dict[str, list[tuple[str, float, float]]] = {}
        self.calls = self.recalls = 0
        self._sends_at = [
            sorted(
                self.begins_at + step.at
                for step in history.steps
                if isinstance(step, Send) and step.queue == queue
            )
            for queue in range(len(self.urls))
        ]
        self.workers = [Worker(self, 0), Worker(self, 1)]
        self.retired: list[Worker] = []
        for step in history.steps:
            self.after(step.at, lambda step=step: self._do(step), None)

    @property
    def seconds(self) -> float:
        return self.clock.now - self.begins_at

    def after(self, seconds: float, do: Callable[[], object], worker: Worker | None) -> None:
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._count), do, worker))

    def run(self) -> None:
        for _ in range(_MAX_EVENTS):
            if self.is_over() or not self._events:
                break
            at, _, do, worker = heapq.heappop(self._events)
            self.clock.now = max(self.clock.now, at)
            if self.seconds > _LAST_SECONDS:
                break
            if worker is None:
                do()
            elif worker.is_alive:
                if self.seconds < worker.stalled_until:
                    self.after(worker.stalled_until - self.seconds, do, worker)
                else:
                    do()
        self.judge.at_the_end()

    def is_over(self) -> bool:
        return (
            self.seconds > TROUBLE_SECONDS
            and not any(self.sqs.queues[url].messages for url in self.urls)
            and not any(w.keeper.waiting or w.running for w in self.workers)
        )

    def _do(self, step: Step) -> None:
        if isinstance(step, Send):
            body = self.judge.sent(step)
            self._runs[body] = list(step.runs)
            options = {"MessageGroupId": step.group} if self.history.queues[step.queue].fifo else {}
            self.sqs.send_message(QueueUrl=self.urls[step.queue], MessageBody=body, **options)
        elif isinstance(step, Kill):
            self.replace(self.workers[step.worker])
        elif isinstance(step, Stop):
            self.workers[step.worker].stop()
        elif isinstance(step, Stall):
            worker = self.workers[step.worker]
            worker.stalled_until = self.seconds + step.seconds
            self.judge.stalled(worker, step.seconds)

    def replace(self, worker: Worker) -> None:
        """A worker is gone, with all that it knows; another one starts."""
        self.judge.killed(worker)
        worker.is_alive = False
        self.retired.append(worker)
        self.workers[worker.number] = Worker(self, worker.number)

    def kills_in_recall(self, worker: Worker, point: RecallPoint) -> bool:
        """Kill a worker if the history says so of this point of this recall."""
        self.recalls += point is RecallPoint.TAKEN
        is_now = worker.is_alive and any(
            isinstance(step, KillInRecall) and (step.number, step.point) == (self.recalls, point)
            for step in self.history.steps
        )
        if is_now:
            self.judge.recall_kills += 1
            self.replace(worker)
        return is_now

    def is_calm(self) -> bool:
        """Whether nobody is killed or stalled, and no call fails."""
        return not any(
            isinstance(x, Fault | Kill | KillInRecall | Stall) for x in self.history.steps
        )

    @property
    def _down(self) -> Down | None:
        return next(
            (
                step
                for step in self.history.steps
                if isinstance(step, Down) and step.at <= self.seconds < step.at + step.seconds
            ),
            None,
        )

    def retry_after(self) -> float | None:
        return None if self._down is None else self._down.retry_after

    def next_run(self, body: str) -> tuple[str, float, float]:
        if self._down is not None:
            self.judge.wasted += 1
            return "retry", _FAILED_SECONDS, _FAILED_DELAY_SECONDS
        runs = self._runs[body]
        return runs.pop(0) if len(runs) > 1 else runs[0]

    def next_message_in(self, queue: int) -> float:
        """When a long poll would return: messages become visible, or are sent."""
        now, url = self.clock.now, self.urls[queue]
        sends = self._sends_at[queue]
        place = bisect.bisect_right(sends, now)
        soonest = sends[place] if place < len(sends) else now + 20.0
        for message in self.sqs.queues[url].messages:
            if message.visible_at <= now:
                return _BACKLOG_SECONDS
            soonest = min(soonest, message.visible_at)
        return max(0.05, min(soonest - now, 20.0))

    # Calls

    def send_off(self, worker: Worker, call: Call) -> None:
        self.calls += 1
        fault = self.fault_of(call.operation.value, call.url)
        way = self.way_of(fault)
        self.judge.called(worker, call, fault)
        # What has left arrives, whatever becomes of the worker.
        self.after(way, lambda: self._arrive(worker, call, fault, way), None)

    def _arrive(self, worker: Worker, call: Call, fault: Fault | None, way: float) -> None:
        self.judge.arrived(worker, call)
        with self.faulty(call.operation.value, fault):
            results = carry_out(call, Calls(self.sqs, call.url))  # type: ignore[arg-type]
        self.after(way, lambda: self._answer(worker, call, results), worker)

    def _answer(self, worker: Worker, call: Call, results: Any) -> None:
        worker.keeper.enter(call, results)
        worker.pump()

    @staticmethod
    def way_of(fault: Fault | None) -> float:
        return _SLOW_WAY_SECONDS if fault is not None and fault.how == "slow" else _WAY_SECONDS

    @contextmanager
    def faulty(self, action: str, fault: Fault | None) -> Iterator[None]:
        """The next call fails as a fault says."""
        if fault is not None and fault.how == "entries":
            entries = frozenset({0, 2})
            self.sqs.faults = [fake_sqs.Fault(action, "InternalError", entries=entries)]
        elif fault is not None and fault.how != "slow":
            is_lost = fault.how == "lost response"
            self.sqs.faults = [fake_sqs.Fault(action, _ERRORS[fault.how], after=is_lost)]
        yield
        self.sqs.faults = []

    def fault_of(self, action: str, url: str) -> Fault | None:
        return next(
            (
                fault
                for fault in self.faults
                if fault.action == action
                and self.urls[fault.queue] == url
                and fault.at <= self.seconds < fault.at + fault.seconds
            ),
            None,
        )


def run(history: History) -> Judge:
    """Run a history to its end; ``wrong`` of what is returned says what must not have been."""
    log = logging.getLogger("celery_sqs_backoff.worker")
    propagates, log.propagate = log.propagate, False
    null = logging.NullHandler()
    log.addHandler(null)
    try:
        simulation = Simulation(history)
        simulation.run()
    finally:
        log.propagate = propagates
        log.removeHandler(null)
    return simulation.judge
