"""What must hold in every history, and which extra run has which cause.

1. No message is neither done, nor waiting, nor a dead letter.
2. A run of a message that has served, that runs elsewhere, or that backs off, has a named cause:
   its worker was killed or stalled, or its calls failed for longer than a lease can bear.
3. No queue waits for another: a settlement on a queue without faults is confirmed within seconds.
4. Whoever holds a message that SQS shows to others has been told of the loss; and nobody hides or
   shows a message that somebody else has received meanwhile.
5. The calls stay within a budget of runs, renewals and time.
6. On a FIFO queue nothing runs before an earlier message of its group is over.

The rules of a provider are in ``provider``.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_sqs_backoff.retry.decision import DeadLetter, End, Ended, Hide, Settle
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from celery_sqs_backoff.sqs.errors import Operation
from celery_sqs_backoff.sqs.settlement import Call, Purpose
from celery_sqs_backoff.worker.lease import Lease, State

from ..support.fake_sqs_queue import Message

if TYPE_CHECKING:
    from .history import Fault, Send
    from .world import Simulation, Worker

__all__ = ["Judge"]

#: A lease survives calls about visibility that fail for this share of its visibility timeout.
_BEARABLE_SHARE = 0.3

#: A settlement on a healthy queue is confirmed by then.
_SETTLED_WITHIN_SECONDS = 3.0

#: After a fault the lane may still pause for this long.
_PAUSE_SECONDS = 65.0

#: More than one way between a worker and SQS.
_WAY_SECONDS = 0.02

_HIDES = (Purpose.HIDE, Purpose.GIVE_BACK)

_HANDS_OFF = (State.LOST, State.MERGED)


@dataclass
class Fate:
    queue: int
    fifo_group: str | None
    number: int
    succeeded: bool = False
    given_up: bool = False
    taken_by_sqs: bool = False
    #: Backs off until then, as far as its worker could tell SQS.
    due_at: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    running: set[int] = field(default_factory=set)


class Judge:
    """Watches a simulation. ``wrong``: what must not have been."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.wrong: list[str] = []
        self.fates: dict[str, Fate] = {}
        self.causes: Counter[str] = Counter()
        self.runs = self.extra_runs = self.looks = 0
        #: Of the provider: calls while it was down, messages brought forward, workers killed then.
        self.wasted = self.recalls = self.recall_kills = self.stops = 0
        #: Receipt handles of messages that a call may have hidden.
        self.in_doubt: set[str] = set()
        self.held_for_renewals = 0.0
        self._holders: dict[str, Worker] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()

    def _say(self, what: str) -> None:
        self.wrong.append(f"{self.sim.seconds:.2f} s: {what}")

    # What happens

    def sent(self, step: Send) -> str:
        key = step.queue, step.group
        number = self._numbers[key]
        self._numbers[key] += 1
        body = f"{step.queue}/{step.group}/{number}"
        is_fifo = self.sim.history.queues[step.queue].fifo
        self.fates[body] = Fate(step.queue, step.group if is_fifo else None, number)
        return body

    def received(self, worker: Worker, message: dict[str, Any]) -> None:
        """4: whoever believes to hold it is wrong about it."""
        self._holders[message["ReceiptHandle"]] = worker
        for other in self.sim.workers:
            if other is worker or other.stalled_until >= self.sim.seconds - 20:
                continue
            for lease in other.leases:
                if lease.body == message["Body"] and lease.state is State.HELD:
                    # The worker cannot know how long its messages were on their way to it: by its
                    # own reckoning the hold ends that much later.
                    ends_now = abs(lease.keeper.clock() - lease.visible_at) < _WAY_SECONDS
                    is_told = lease.may_be_lost or ends_now
                    if not is_told and lease in other.held:
                        self._say(f"{lease.body} is held by one worker and shown to another")

    def arrived(self, worker: Worker, call: Call) -> None:
        """4: a change of visibility must not end the hold of whoever has the message now."""
        for entry in call.entries:
            receipt = self._newest_receipt(entry.row)
            if entry.purpose not in _HIDES or receipt is None:
                continue
            is_others = self._holders.get(receipt.handle, worker) is not worker
            if is_others and receipt.received_at + _WAY_SECONDS < call.asked_at:
                self._say(f"{receipt.message.body} is hidden or shown although another has it")

    def _newest_receipt(self, row: Any) -> Any:
        messages = self.sim.sqs.queues[row.queue.url].messages
        return next((m.receipt for m in messages if m.id == row.message_id), None)

    def started(self, worker: Worker, lease: Lease) -> None:
        self.runs += 1
        fate, now = self.fates[lease.body], self.sim.clock.now
        self._blame_faults(fate)
        why = None
        if fate.succeeded or self._is_dead_letter(lease.body, fate):
            why = "it had served"
        elif fate.running:
            why = "it runs elsewhere"
        elif now < fate.due_at - 0.001:
            why = "it is not due"
        if why is not None:
            self.extra_runs += 1
            if fate.causes:
                self.causes.update([next(iter(fate.causes))])
            else:
                self._say(f"{lease.body} is run although {why}")
        if any(x.body == lease.body for x in worker.running):
            self._say(f"{lease.body} is run beside itself in one worker")
        if fate.fifo_group is not None:
            self._judge_order(lease.body, fate)
        fate.running.add(id(lease))

    def _judge_order(self, body: str, fate: Fate) -> None:
        for number in range(fate.number):
            earlier = self.fates[f"{fate.queue}/{fate.fifo_group}/{number}"]
            if not (earlier.succeeded or earlier.given_up or earlier.taken_by_sqs):
                self._say(f"{body} is run before {number}")

    def ended(self, worker: Worker, lease: Lease, ended: Ended, settle: Settle) -> None:
        fate, now = self.fates[lease.body], self.sim.clock.now
        fate.running.discard(id(lease))
        self.held_for_renewals += now - lease.delivery.received_at
        is_ours = lease.state is State.HELD
        fate.succeeded |= ended.end is End.RETURNED
        fate.given_up |= isinstance(settle, DeadLetter) and is_ours
        if isinstance(settle, Hide) and is_ours and not lease.may_be_lost:
            fate.due_at = now + settle.seconds
        if is_ours and not lease.may_be_lost:
            look = functools.partial(self._judge_settled, worker, lease)
            self.sim.after(_SETTLED_WITHIN_SECONDS, look, None)

    def hidden(self, worker: Worker, lease: Lease) -> None:
        """A message has come due, and is hidden without a run."""
        self.looks += 1
        if not lease.may_be_lost:
            self.fates[lease.body].due_at = lease.due_at
            look = functools.partial(self._judge_settled, worker, lease)
            self.sim.after(_SETTLED_WITHIN_SECONDS, look, None)

    def _judge_settled(self, worker: Worker, lease: Lease) -> None:
        """3: nothing but its own queue's faults may hold a settlement up."""
        was_stalled = worker.stalled_until > self.sim.seconds - _PAUSE_SECONDS
        if not worker.is_alive or was_stalled or self._has_fault(self.fates[lease.body].queue):
            return
        if worker.keeper._table.is_current(lease) and lease.is_entered:
            self._say(f"{lease.body} has not been settled in {_SETTLED_WITHIN_SECONDS:g} s")

    def _has_fault(self, queue: int) -> bool:
        now = self.sim.seconds
        return any(
            fault.queue == queue and fault.at <= now < fault.at + fault.seconds + _PAUSE_SECONDS
            for fault in self.sim.faults
        )

    def told(self, worker: Worker, lease: Lease) -> None:
        fate = self.fates[lease.body]
        self._blame_faults(fate)
        stalled = worker.stalled_until > self.sim.seconds - 60
        if not fate.causes and not stalled and not fate.taken_by_sqs and not fate.succeeded:
            self._say(f"{lease.body} was lost for no reason")

    def called(self, worker: Worker, call: Call, fault: Fault | None) -> None:
        if len({entry.row.queue.url for entry in call.entries}) > 1:
            self._say("a call mixes queues")
        if len(call.entries) > 10:
            self._say("a call of more than ten entries")
        if call.operation is Operation.CHANGE_VISIBILITY and fault is not None:
            for entry in call.entries:
                body = self._body(worker, entry.row)
                if fault.how == "lost response" and entry.purpose is Purpose.HIDE:
                    self.in_doubt.add(entry.handle)
                if fault.how == "slow" and body is not None:
                    self.fates[body].causes["slow calls"] += 1

    @staticmethod
    def _body(worker: Worker, row: Any) -> str | None:
        return next((x.body for x in worker.leases if x is row), None)

    def killed(self, worker: Worker) -> None:
        for lease in worker.leases:
            if self._is_open(worker, lease):
                fate = self.fates[lease.body]
                fate.causes["its worker was killed"] += 1
                fate.running.discard(id(lease))
        for lease in worker.running:
            self.fates[lease.body].running.discard(id(lease))
            self.fates[lease.body].causes["its worker was killed"] += 1

    def stalled(self, worker: Worker, seconds: float) -> None:
        for lease in worker.leases:
            if self._is_open(worker, lease):
                self.fates[lease.body].causes["its worker was stalled"] += 1

    @staticmethod
    def _is_open(worker: Worker, lease: Lease) -> bool:
        return worker.keeper._table.is_current(lease) and lease.state not in _HANDS_OFF

    def gone(self, how: str, message: Message) -> None:
        fate = self.fates[message.body]
        if how != "deleted":
            fate.taken_by_sqs = True
        elif not fate.succeeded and not self._is_dead_letter(message.body, fate):
            self._say(f"{message.body} was deleted, and had not served")

    # Causes

    def _blame_faults(self, fate: Fate) -> None:
        """Calls about visibility that failed for longer than a lease can bear."""
        timeout = self.sim.history.queues[fate.queue].visibility_timeout
        now = self.sim.seconds
        for fault in self.sim.faults:
            lasted = min(now, fault.at + fault.seconds) - fault.at
            is_of_it = fault.queue == fate.queue and fault.action == "ChangeMessageVisibilityBatch"
            needs_long_pause = fault.how in ("denied", "slow") and lasted > 0
            if is_of_it and (needs_long_pause or lasted > timeout * _BEARABLE_SHARE):
                fate.causes[f"{fault.action}: {fault.how}"] += 1

    def _is_dead_letter(self, body: str, fate: Fate) -> bool:
        dlq = self.sim.sqs.queues[self.sim.urls[fate.queue]].dlq
        return dlq is not None and any(
            m.body == body and ATTRIBUTE_NAME in m.attributes for m in dlq.messages
        )

    # At the end

    def at_the_end(self) -> None:
        sim = self.sim
        for body, fate in self.fates.items():
            ended = fate.succeeded or fate.taken_by_sqs or self._is_dead_letter(body, fate)
            in_queue = any(m.body == body for m in sim.sqs.queues[sim.urls[fate.queue]].messages)
            if not ended and not in_queue:
                self._say(f"{body} is lost")
        if not sim.is_over():
            self._say("not over: " + ", ".join(sorted(self._left()))[:200])
        self.wrong += [
            no
            for no in sim.sqs.refusals
            if "receipt handle has expired" not in no and "does not exist" not in no
        ]
        self._judge_calls()

    def _left(self) -> set[str]:
        return {m.body for url in self.sim.urls for m in self.sim.sqs.queues[url].messages}

    def _judge_calls(self) -> None:
        """5: a call or two per run, three renewals per visibility timeout, a few a second at most
        while something is wrong."""
        shortest = min(queue.visibility_timeout for queue in self.sim.history.queues)
        renewals = self.held_for_renewals / (max(shortest, 9) / 3)
        faulty = sum(fault.seconds + 10 for fault in self.sim.faults)
        budget = 40 + 4 * (self.runs + self.looks) + 2 * renewals + 4 * faulty
        if self.sim.calls > budget:
            self._say(f"{self.sim.calls} calls, where {budget:.0f} are enough")
