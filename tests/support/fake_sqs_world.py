"""Workers on a fake SQS, without pool and threads, and a judge of what becomes of each task.

A task is known by its message's body. The judge is strict: what may go wrong must have been excused
by a crash, a fault or a stall that was injected, and for that message.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from celery_sqs_backoff.sqs.calls import RECEIVE_ATTRIBUTES, Calls
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from celery_sqs_backoff.sqs.queues import read_queue
from celery_sqs_backoff.sqs.visibility import visibility_delay
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease, State

from .fake_sqs import Clock, FakeSQS, Fault
from .fake_sqs_queue import Message
from .leases import lease_on, some_record

__all__ = ["Fate", "Worker", "World"]

#: So many failed renewals in a row are no excuse: they are tried again within a second.
_FAULTS_TO_SURVIVE = 5
#: After a delete was refused, those of the whole queue wait: a minute, if it was denied. Meanwhile
#: the windows of messages that are done may end.
_DELETES_MAY_WAIT = 4 * 60
#: More calls to SQS than a worker can have to make at one moment.
_JOBS_AT_ONCE = 1_000
#: Within so much of 12 hours from the receive, a lease may be given up as lost.
_TWELVE_HOURS = 43_200 - 120


@dataclass
class Fate:
    """What the judge knows of a task."""

    succeeded: bool = False
    given_up: bool = False
    #: Retention has ended, or SQS has moved the message by itself.
    taken_by_sqs: bool = False
    #: Why it may be run once more although it has served, or while it runs.
    excuse: str | None = None
    visibility_faults: int = 0

    @property
    def is_over(self) -> bool:
        return self.succeeded or self.given_up or self.taken_by_sqs


class Worker:
    """A keeper, and the tasks that run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keeper = Keeper(
            clock=world.clock,
            rng=random.Random(7),
        )
        self.running: list[Lease] = []
        self.freed: Counter[Lease] = Counter()
        self.leases: list[Lease] = []
        #: Tasks that it must never run again.
        self.served: set[str] = set()

    def receive(self, limit: int) -> int:
        """As ``Receiver.lease`` and the strategy do; return how many messages came."""
        answer = self.world.sqs.receive_message(
            QueueUrl=self.world.url,
            MaxNumberOfMessages=1 if self.world.queue.is_fifo else limit,
            WaitTimeSeconds=20,
            **RECEIVE_ATTRIBUTES,
        )
        messages = answer.get("Messages", [])
        for message in messages:
            self.world.judge_receive(message["Body"])
            lease = self._hold(message)
            if not self.keeper.recognise(lease):
                self._start(lease)
        return len(messages)

    def _hold(self, message: dict[str, Any]) -> Lease:
        queue = self.world.attributes
        lease = lease_on(
            message,
            queue=queue,
            calls=self.world.calls,
            keeper=self.keeper,
            now=self.world.clock(),
            free=lambda: self.freed.update([lease]),
        )
        self.leases.append(lease)
        self.keeper.hold(lease)
        return lease

    def _start(self, lease: Lease) -> None:
        self.world.judge_start(self, lease)
        self.running.append(lease)

    def end(self, lease: Lease, how: str, delay: float = 1.0) -> None:
        """End a run as ``BackoffRequest`` does: success, failure, giving up, or cancelled."""
        self.running.remove(lease)
        self.world.judge_end(lease)
        delivery, fate = lease.delivery, self.world.fates[lease.body]
        if how == "success":
            fate.succeeded = True
            if lease.done():
                self.served.add(lease.body)
        elif how == "cancelled":
            lease.release()
        elif how == "give up" or delivery.is_last_before_sqs_moves_it:
            if lease.dead_letter(some_record(self.world.clock())):
                fate.given_up = True
                self.served.add(lease.body)
        else:
            self.world.deferred_at[lease] = self.world.clock()
            lease.defer(visibility_delay(delay, delivery, now=self.world.clock()))

    def turn(self) -> None:
        """Do all that is due."""
        for _ in range(_JOBS_AT_ONCE):
            job = self.keeper.next_job()
            if job is None:
                return
            self.keeper.perform(job)
        raise AssertionError("the keeper finds something to do for ever")

    def next_at(self) -> float:
        """When there may be something to do."""
        return self.keeper.next_at()


class World:
    """A queue with a DLQ on a fake SQS, two workers, and what has gone wrong."""

    def __init__(
        self, *, fifo: bool, visibility_timeout: int, max_receive_count: int, max_in_flight: int
    ) -> None:
        self.clock = Clock()
        self.sqs = FakeSQS(self.clock, max_in_flight=max_in_flight)
        end, kind = "", {"MessageRetentionPeriod": "1209600"}
        if fifo:
            end, kind = ".fifo", {**kind, "FifoQueue": "true", "ContentBasedDeduplication": "true"}
        dlq = self.sqs.create_queue(QueueName=f"dlq{end}", Attributes=kind)["QueueUrl"]
        self.dlq = self.sqs.queues[dlq]
        policy = {"deadLetterTargetArn": self.dlq.arn, "maxReceiveCount": max_receive_count}
        attributes = {"RedrivePolicy": json.dumps(policy)}
        attributes["VisibilityTimeout"] = str(visibility_timeout)
        self.url = self.sqs.create_queue(QueueName=f"q{end}", Attributes=kind | attributes)[
            "QueueUrl"
        ]
        self.queue = self.sqs.queues[self.url]
        self.calls = Calls(self.sqs, self.url)  # type: ignore[arg-type]
        self.attributes = read_queue(self.calls, self.url)
        self.queue.on_gone = self._judge_gone
        self.sqs.on_fault = self._excuse_fault
        self.fates: dict[str, Fate] = {}
        self.workers = [Worker(self), Worker(self)]
        self.retired: list[Worker] = []
        self.wrong: list[str] = []
        #: When runs ended that are to come back.
        self.deferred_at: dict[Lease, float] = {}
        #: Backoffs that SQS knows of, and settlements that a fault or a stall may have spoiled.
        self._confirmed: set[Lease] = set()
        self._spoiled: set[Lease] = set()
        self._changes_seen = 0
        self._removals_failed_at = -math.inf
        self._log = _Failures(self.wrong)

    # What happens

    def send(self, group: str) -> None:
        body = f"{group}/{sum(b.startswith(group) for b in self.fates)}"
        self.fates[body] = Fate()
        options = {"MessageGroupId": group} if self.queue.is_fifo else {}
        self.sqs.send_message(QueueUrl=self.url, MessageBody=body, **options)

    def pass_time(self, seconds: float, *, stalled: Worker | None = None) -> None:
        """Let all but one worker do what is due, when it is due."""
        end = self.clock.now + seconds
        turning = [worker for worker in self.workers if worker is not stalled]
        while True:
            for worker in turning:
                worker.turn()
            if self.clock.now >= end:
                break
            soon = min((worker.next_at() for worker in turning), default=end)
            self.clock.now = min(end, max(soon, self.clock.now + 0.05))
        for lease in [x for worker in self.workers for x in worker.leases]:
            if lease.state is State.LOST and self._held_seconds(lease) >= _TWELVE_HOURS:
                self._excuse(lease.body, "held for twelve hours")
        if stalled is not None:
            for lease in self._unfinished(stalled):
                if self.clock.now >= lease.visible_at:
                    self._excuse(lease.body, "its worker stalled")

    def crash(self, worker: Worker) -> None:
        """SIGKILL: another worker takes the place of this one."""
        for lease in self._unfinished(worker):
            self._excuse(lease.body, "its worker crashed")
        self._replace(worker)

    def shut_down(self, worker: Worker) -> None:
        """A cold shutdown: what runs is cancelled, and SQS is told of all that is settled."""
        worker.running.clear()
        worker.keeper.stop(0)
        worker.turn()
        if worker.keeper.waiting:
            self.crash(worker)
        else:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self.workers[self.workers.index(worker)] = Worker(self)
        self.retired.append(worker)
        worker.running.clear()

    def drain(self) -> None:
        """Everything works again, and every task succeeds: then all of them must come to an end."""
        self.sqs.faults.clear()
        self.sqs.during_call = lambda action, bodies: None
        for _ in range(100):
            for worker in self.workers:
                for lease in list(worker.running):
                    worker.end(lease, "success")
                worker.receive(10)
            self.pass_time(1)
            if not self.queue.messages and not any(w.keeper.waiting for w in self.workers):
                break
            if not any(worker.running for worker in self.workers):
                later = (m.visible_at for m in self.queue.messages if m.visible_at > self.clock.now)
                self.pass_time(min(later, default=self.clock.now) - self.clock.now)
        else:
            self.wrong.append(f"not drained: {[m.body for m in self.queue.messages]}")
        self.judge()

    # What may be wrong with it

    def judge(self) -> None:
        """Look for what must never be, whatever has happened."""
        self._note_confirmed()
        self.wrong += [no for no in self.sqs.refusals if not _is_of_a_stale_handle(no)]
        for body, fate in self.fates.items():
            ended = fate.succeeded or fate.taken_by_sqs or self._is_dead_letter(body)
            if not ended and all(message.body != body for message in self.queue.messages):
                self.wrong.append(f"{body} is lost")
        for worker in [*self.workers, *self.retired]:
            for lease in worker.leases:
                self._judge_lease(worker, lease)
            worker.leases = [x for x in worker.leases if not self._is_history(x)]
        self.retired = [worker for worker in self.retired if worker.leases]

    def _judge_lease(self, worker: Worker, lease: Lease) -> None:
        if worker.freed[lease] != (lease.state is not State.HELD):
            self.wrong.append(f"{lease.body} was freed {worker.freed[lease]} times: {lease.state}")
        fate = self.fates[lease.body]
        if lease.state is State.LOST and not fate.taken_by_sqs and fate.excuse is None:
            self.wrong.append(f"{lease.body} was lost for no reason")
        message = self.queue.message_of(lease.handle)
        if lease in self._confirmed and lease not in self._spoiled and message.receipt is not None:
            is_newest = message.receipt.handle == lease.handle
            if is_newest and message.visible_at < lease.due_at and message in self.queue.messages:
                self.wrong.append(f"the backoff of {lease.body} was cut short")

    def judge_receive(self, body: str) -> None:
        self._note_confirmed()
        for lease in self._confirmed - self._spoiled:
            if lease.body == body and self.clock.now < lease.due_at:
                self.wrong.append(f"{lease.body} came back before it was due")

    def judge_start(self, worker: Worker, lease: Lease) -> None:
        body, fate = lease.body, self.fates[lease.body]
        if body in worker.served:
            self.wrong.append(f"{body} was run although its worker was done with it")
        if any(x.body == body and x.state is State.HELD for x in worker.running):
            self.wrong.append(f"{body} was run beside itself in one worker")
        if fate.excuse is None:
            if fate.succeeded or self._is_dead_letter(body):
                self.wrong.append(f"{body} was run although it had served")
            if any(x.body == body for other in self.workers for x in other.running):
                self.wrong.append(f"{body} was run in two workers")
        group, _, number = body.partition("/")
        for earlier in range(int(number) if self.queue.is_fifo else 0):
            if not self.fates[f"{group}/{earlier}"].is_over:
                self.wrong.append(f"{body} was run before {earlier}")

    def _judge_gone(self, how: str, message: Message) -> None:
        fate = self.fates[message.body]
        if how != "deleted":
            fate.taken_by_sqs = True
        elif not (fate.succeeded or self._is_dead_letter(message.body)):
            self.wrong.append(f"{message.body} was deleted, and had not served")

    def _is_dead_letter(self, body: str) -> bool:
        return any(m.body == body and ATTRIBUTE_NAME in m.attributes for m in self.dlq.messages)

    # Excuses

    def _excuse(self, body: str, why: str) -> None:
        self.fates[body].excuse = why
        self._spoil(body)

    def _spoil(self, body: str) -> None:
        self._note_confirmed()
        for worker in self.workers:
            self._spoiled |= {x for x in self._unfinished(worker) if x.body == body}

    def _excuse_fault(self, fault: Fault, bodies: list[str]) -> None:
        for body in filter(None, bodies):
            if fault.action in ("DeleteMessageBatch", "SendMessageBatch"):
                self._excuse(body, f"{fault.action} failed")
                self._excuse_removals()
            elif fault.action == "ChangeMessageVisibilityBatch":
                self._spoil(body)
                self.fates[body].visibility_faults += 1
                if self.fates[body].visibility_faults > _FAULTS_TO_SURVIVE:
                    self._excuse(body, "many renewals failed")

    def _excuse_removals(self) -> None:
        """Those that wait behind a failed one, and those that will in the next minutes."""
        self._removals_failed_at = self.clock.now
        for lease in [x for worker in self.workers for x in worker.leases]:
            if lease.state in (State.DONE, State.DEAD_LETTERED):
                self._excuse(lease.body, "its delete waits behind one that failed")

    def judge_end(self, lease: Lease) -> None:
        if self.clock.now < self._removals_failed_at + _DELETES_MAY_WAIT:
            self._excuse(lease.body, "its delete waits behind one that failed")

    def _unfinished(self, worker: Worker) -> list[Lease]:
        return [
            x for x in worker.leases if x not in self._confirmed and x.state is not State.MERGED
        ]

    def _held_seconds(self, lease: Lease) -> float:
        return self.clock.now - lease.received_at

    def _note_confirmed(self) -> None:
        """Find the changes of visibility that were the settlement of a lease."""
        changes = self.sqs.changes[self._changes_seen :]
        self._changes_seen = len(self.sqs.changes)
        if not changes:
            return
        settled = {
            lease.handle: lease
            for worker in [*self.workers, *self.retired]
            for lease in worker.leases
            if lease.state is State.DEFERRED
        }
        for change in changes:
            lease = settled.get(change.handle)
            if lease is not None and change.at > self.deferred_at.get(lease, lease.due_at):
                self._confirmed.add(lease)

    def _is_history(self, lease: Lease) -> bool:
        """Whether nothing that happens from now on can tell of the lease."""
        if lease.state is State.DEFERRED:
            return lease in self._confirmed and self.clock.now >= lease.due_at
        gone = self.queue.message_of(lease.handle) not in self.queue.messages
        return lease.state is not State.HELD and gone

    def close(self) -> None:
        self._log.close()


class _Failures(logging.Handler):
    """Notes the errors that the keeper has caught; keeps the rest out of the test's output."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong
        self._logger = logging.getLogger("celery_sqs_backoff.worker")
        self._propagates, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._wrong.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def close(self) -> None:
        self._logger.propagate = self._propagates
        self._logger.removeHandler(self)
        super().close()


def _is_of_a_stale_handle(refusal: str) -> bool:
    return "receipt handle has expired" in refusal or "does not exist" in refusal
