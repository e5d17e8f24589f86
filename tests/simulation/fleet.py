"""Run two workers through a history of faults in virtual time, and judge what they do.

The workers run on the rig (``tests/rig``). The judge sees the calls to SQS and the runs of tasks,
but nothing inside the workers. It checks these rules:

1. No message is lost. A message leaves its queue only if its task has succeeded, or if it has
   become a dead letter with a reason.
2. No message runs when it has succeeded, while it runs elsewhere, or before it is due. It may do so
   only if its worker was killed or suspended, or if calls about its visibility failed for too long.
3. Queues do not wait for each other. Within seconds after a run, the worker deletes or hides the
   message, unless a fault hits the message's own queue.
4. No worker hides a message, or makes it visible, after another worker has received it.
5. On a FIFO queue, no message runs before all earlier messages of its group have ended.
6. Workers rarely call a provider that is down, and run its messages when it is back.
7. The number of calls stays within a budget for runs, renewals and faults.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_sqs_backoff import Provider, Retryable, Schedule
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME

from ..rig import Message, Rig, Run, Worker
from ..rig.timeline import BEGIN
from ..support.fake_sqs_queue import Message as Sent

#: Faults happen for this long. After that, everything works again.
TROUBLE_SECONDS = 150.0

#: A history that has not ended after this time would never end.
LAST_SECONDS = 40_000.0

DELAYS = (1, 20, 200)

#: A worker keeps its message if its renewals fail for at most this share of the visibility timeout.
_BEARABLE_SHARE = 0.3
_SETTLED_WITHIN_SECONDS = 3.0

#: After a fault, a worker may pause calls about the queue for this long. It pauses for a minute if
#: AWS has denied a call.
_PAUSE_SECONDS = 65.0

_VISIBILITY = "ChangeMessageVisibilityBatch"
_NEVER = float("inf")


@dataclass(frozen=True)
class Queue:
    fifo: bool = False
    visibility_timeout: int = 30
    max_receive_count: int = 1_000


@dataclass(frozen=True)
class Send:
    """Sends ``count`` messages.

    ``runs`` says how each of their first runs ends, and how many seconds it takes. The next run
    takes ``seconds`` and succeeds.
    """

    at: float
    queue: int
    group: str = "x"
    runs: tuple[tuple[str, float], ...] = ()
    count: int = 1
    seconds: float = 0.05


@dataclass(frozen=True)
class Fault:
    """Calls of one action about one queue fail for a while.

    With the error "slow", all calls about all queues succeed, but request and response take 4 s
    each.
    """

    at: float
    seconds: float
    queue: int
    action: str
    error: str


@dataclass(frozen=True)
class Kill:
    """A worker gets SIGKILL. A second later, another one takes its place."""

    at: float
    worker: int


@dataclass(frozen=True)
class Suspend:
    """The machine of a worker is suspended for a while."""

    at: float
    worker: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    """A worker gets SIGTERM. When it has ended, another one takes its place."""

    at: float
    worker: int


@dataclass(frozen=True)
class Down:
    """The provider of all tasks is down for a while."""

    at: float
    seconds: float
    retry_after: float | None = None


Step = Send | Fault | Kill | Suspend | Stop | Down


@dataclass(frozen=True)
class History:
    queues: tuple[Queue, ...]
    steps: tuple[Step, ...]
    has_provider: bool = False


@dataclass(eq=False)
class _Fate:
    """What the judge knows about a message."""

    key: int
    queue: int
    group: str
    plan: list[tuple[str, float]]
    message: Message
    succeeded: bool = False
    moved: bool = False
    due_at: float = 0.0
    running: set[Run] = field(default_factory=set)
    causes: Counter[str] = field(default_factory=Counter)
    began_at: float = 0.0


class Fleet:
    """Runs one history. ``wrong`` lists each breach of a rule."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.wrong: list[str] = []
        self.fates: dict[int, _Fate] = {}
        self.runs = self.extra_runs = self.calls_while_down = 0
        self.causes: Counter[str] = Counter()
        self._held_seconds = 0.0
        self._handles: dict[str, Worker] = {}
        self._changes_seen = 0
        self._ended_task_ids: set[str] = set()

    def run(self) -> Fleet:
        logging.disable()
        try:
            self._run()
        finally:
            logging.disable(logging.NOTSET)
        return self

    def _run(self) -> None:
        with Rig() as self.rig:
            self.rig.app.conf.task_publish_retry = False
            self._build()
            self.workers = [self._start(), self._start()]
            for step in self.history.steps:
                self._at(step.at, functools.partial(self._do, step))
            self._at(TROUBLE_SECONDS, self._heal)
            self.rig.pass_time(TROUBLE_SECONDS)
            self.rig.pass_time(LAST_SECONDS, until=self._is_over)
            self._judge_at_the_end()

    # Rig, queues and workers

    def _build(self) -> None:
        rig = self.rig
        self.urls = []
        for number, spec in enumerate(self.history.queues):
            kind = {"MessageRetentionPeriod": "1209600"}
            if spec.fifo:
                kind |= {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
            url = rig.queue(
                f"q{number}" + (".fifo" if spec.fifo else ""),
                max_receive_count=spec.max_receive_count,
                VisibilityTimeout=str(spec.visibility_timeout),
                **kind,
            )
            self.urls.append(url)
            rig.sqs.queues[url].on_gone = self._judge_gone
        options: dict[str, Any] = {"provider": Provider("p")} if self.history.has_provider else {}

        def body(task: Any, key: int) -> str:
            return self._body(key)

        rig.task(body, backoff=Schedule(DELAYS), retry_for=None, **options)
        rig.on_run = self._begin
        wake = rig.sqs.on_call

        def on_call(action: str) -> None:
            self._judge_call(action)
            wake(action)

        rig.sqs.on_call = on_call

    def _start(self) -> Worker:
        names = [url.rpartition("/")[2] for url in self.urls]
        return self.rig.start_worker(queues=names, processes=4)

    def _at(self, seconds: float, do: Any) -> None:
        self.rig.timeline.at(BEGIN + seconds, do)

    @property
    def _seconds(self) -> float:
        return self.rig.timeline.now - BEGIN

    def _say(self, what: str) -> None:
        self.wrong.append(f"{self._seconds:.2f} s: {what}")

    # The steps of the history

    def _do(self, step: Step) -> None:
        if isinstance(step, Send):
            for _ in range(step.count):
                self._send(step)
        elif isinstance(step, Fault):
            self._fail(step)
        elif isinstance(step, Kill):
            self._kill(step.worker)
        elif isinstance(step, Suspend):
            self._suspend(step)
        elif isinstance(step, Stop):
            self._stop(step.worker)

    def _send(self, step: Send) -> None:
        url = self.urls[step.queue]
        options: dict[str, Any] = {"queue": url.rpartition("/")[2]}
        if url.endswith(".fifo"):
            options["MessageGroupId"] = step.group
        key = len(self.fates)
        message = self.rig.send("mail", (key,), **options)
        plan = [*step.runs, ("success", step.seconds)]
        self.fates[key] = _Fate(key, step.queue, step.group, plan, message)

    def _fail(self, step: Fault) -> None:
        if step.error == "slow":
            self.rig.latency = 8.0
            self._at(self._seconds + step.seconds, lambda: setattr(self.rig, "latency", 0.0))
            for fate in self.fates.values():
                fate.causes["slow calls"] += 1
            return
        error: Any = step.error
        if step.error in ("unreachable", "lost answer"):
            error = ConnectionError()
        entries = {"entries": (0,), "error": "InternalError"} if step.error == "entries" else {}
        self.rig.fault(
            step.action,
            **{"error": error, **entries},
            seconds=step.seconds,
            answer_lost=step.error == "lost answer",
            queue=self.urls[step.queue],
        )

    def _heal(self) -> None:
        self.rig.sqs.heal()
        self.rig.latency = 0.0

    def _kill(self, number: int) -> None:
        worker = self.workers[number]
        if worker.is_alive:
            self._blame(worker, "its worker was killed")
            worker.kill()
            self._at(self._seconds + 1, functools.partial(self._replace, number, worker))

    def _suspend(self, step: Suspend) -> None:
        worker = self.workers[step.worker]
        self._blame(worker, "its worker was suspended")
        worker.suspend(step.seconds)

    def _blame(
        self, worker: Worker, cause: str, of_queue: Callable[[int], bool] = lambda queue: True
    ) -> None:
        """Note a cause because of which messages that a worker has received may run again."""
        for fate in self.fates.values():
            if not of_queue(fate.queue):
                continue
            receipt = fate.message._sent.receipt
            holder = receipt and self._handles.get(receipt.handle)
            if holder is worker or any(run.worker is worker for run in fate.running):
                fate.causes[cause] += 1
            if "killed" in cause:
                fate.running = {run for run in fate.running if run.worker is not worker}

    def _stop(self, number: int) -> None:
        worker = self.workers[number]
        if worker.is_alive and not worker.is_suspended:
            self._blame(worker, "its worker was stopped while calls failed", self._has_fault)
            worker.stop()
            self._await_stop(number, worker)

    def _await_stop(self, number: int, worker: Worker) -> None:
        if worker.is_alive:
            again = functools.partial(self._await_stop, number, worker)
            self._at(self._seconds + 1, again)
        else:
            self._replace(number, worker)

    def _replace(self, number: int, worker: Worker) -> None:
        if self.workers[number] is worker:
            self.workers[number] = self._start()

    # Runs

    def _is_down(self) -> Down | None:
        steps = (step for step in self.history.steps if isinstance(step, Down))
        return next((s for s in steps if s.at <= self._seconds < s.at + s.seconds), None)

    def _body(self, key: int) -> str:
        """End a run as planned. This is the task's body. The rig calls it when the run is over."""
        fate = self.fates[key]
        if (down := self._is_down()) is not None and self.history.has_provider:
            raise Retryable("down", retry_after=down.retry_after)
        how = fate.plan.pop(0)[0] if len(fate.plan) > 1 else "success"
        if how == "retry":
            raise Retryable("busy")
        if how == "give up":
            raise ValueError("no such customer")
        fate.succeeded = True
        return "done"

    def _begin(self, run: Run) -> None:
        run.worker.after(0.0, lambda: self._begin_now(run))

    def _begin_now(self, run: Run) -> None:
        if run not in run.worker.runs or run.has_begun:
            return
        run.begin()
        [fate] = [f for f in self.fates.values() if f.message.task_id == run.task_id]
        self._judge_start(run, fate)
        fate.running.add(run)
        fate.began_at = self.rig.timeline.now
        how, seconds = fate.plan[0]
        run.worker.after(seconds, lambda: self._end(run, fate, how))

    def _end(self, run: Run, fate: _Fate, how: str) -> None:
        if run not in run.worker.runs:
            return
        if how == "crash" and len(fate.plan) > 1:
            fate.plan.pop(0)
            run.lose()
        else:
            run.finish()
        fate.running.discard(run)
        self._held_seconds += self.rig.timeline.now - fate.began_at
        ended_at = self.rig.timeline.now
        look = functools.partial(self._judge_settled, run.worker, fate, ended_at)
        self._at(self._seconds + _SETTLED_WITHIN_SECONDS, look)

    # The judge

    def _judge_start(self, run: Run, fate: _Fate) -> None:
        self.runs += 1
        self.calls_while_down += self._is_down() is not None
        now = self.rig.timeline.now
        self._blame_faults(fate)
        why = None
        if fate.succeeded or fate.message.record is not None:
            why = "it had ended"
        elif any(other.worker.is_alive for other in fate.running):
            why = "it runs elsewhere"
        elif now < fate.due_at - 0.001:
            why = "it is not due"
        if why is not None:
            self.extra_runs += 1
            if fate.causes:
                self.causes.update([next(iter(fate.causes))])
            else:
                self._say(f"{fate.key} is run although {why}")
        if any(other.worker is run.worker for other in fate.running):
            self._say(f"{fate.key} is run beside itself in one worker")
        if self.history.queues[fate.queue].fifo:
            self._judge_order(fate)

    def _judge_order(self, fate: _Fate) -> None:
        for earlier in self.fates.values():
            is_before = (earlier.queue, earlier.group) == (fate.queue, fate.group)
            if is_before and earlier.key < fate.key and not self._has_ended(earlier):
                self._say(f"{fate.key} is run before {earlier.key}")

    def _judge_settled(self, worker: Worker, fate: _Fate, ended_at: float) -> None:
        """Check rule 3 for a run that has ended a few seconds ago."""
        sent = fate.message._sent
        receipt = sent.receipt
        if (
            not worker.is_alive
            or worker.is_suspended
            or self.rig.latency
            or fate.causes
            or self._has_fault(fate.queue)
            or fate.running
            or fate.message.fate in ("deleted", "dead letter", "moved")
            or (receipt is not None and receipt.received_at > ended_at)
        ):
            return
        changes = [c for c in self.rig.sqs.changes if c.message is sent and c.at >= ended_at]
        if not changes:
            self._say(f"no call to SQS in {_SETTLED_WITHIN_SECONDS:g} s after {fate.key} ended")

    def _has_fault(self, queue: int) -> bool:
        now = self._seconds
        return any(
            step.queue == queue and step.at <= now < step.at + step.seconds + _PAUSE_SECONDS
            for step in self.history.steps
            if isinstance(step, Fault)
        )

    def _judge_call(self, action: str) -> None:
        call, worker = self.rig.sqs.calls[-1], self.rig._acting
        if action == "ReceiveMessage" and worker is not None:
            for message in (call.answer or {}).get("Messages", ()):
                self._handles[message["ReceiptHandle"]] = worker
        if action == _VISIBILITY:
            self._judge_changes()

    def _judge_changes(self) -> None:
        changes = self.rig.sqs.changes
        for change in changes[self._changes_seen :]:
            newest = change.message.receipt
            owner, holder = self._handles.get(change.handle), self._handles.get(newest.handle)
            fate = next((f for f in self.fates.values() if f.message._sent is change.message), None)
            if fate is None or not change.worked:
                continue
            timeout = self.history.queues[fate.queue].visibility_timeout
            is_hidden_or_shown = change.seconds == 0 or change.seconds in DELAYS
            is_late = newest.received_at < change.at - self.rig.latency - 0.02
            if is_hidden_or_shown and owner is not holder and is_late and change.seconds != timeout:
                self._say(f"{fate.key} is hidden or shown although another worker has it")
            if owner is holder and change.seconds in DELAYS and not fate.running:
                fate.due_at = change.at + change.seconds if not fate.succeeded else 0.0
            elif change.seconds == 0:
                fate.due_at = 0.0  # the worker has made the message visible
        self._changes_seen = len(changes)

    def _judge_gone(self, how: str, sent: Sent) -> None:
        [fate] = [f for f in self.fates.values() if f.message._sent is sent]
        if how != "deleted":
            fate.moved = True
        elif not fate.succeeded and not self._is_dead_letter(fate):
            self._say(f"{fate.key} was deleted, and had not succeeded")

    def _blame_faults(self, fate: _Fate) -> None:
        """Note as causes all faults by which a worker can lose its message.

        These are slow calls, and calls about visibility that fail for too long.
        """
        timeout = self.history.queues[fate.queue].visibility_timeout
        for step in self.history.steps:
            if not isinstance(step, Fault):
                continue
            lasted = min(self._seconds, step.at + step.seconds) - step.at
            if step.error == "slow" and lasted > 0:
                fate.causes["slow calls"] += 1
            elif step.queue == fate.queue and step.action == _VISIBILITY:
                is_long = step.error == "AccessDenied" and lasted > 0
                if is_long or lasted > timeout * _BEARABLE_SHARE:
                    fate.causes[f"{_VISIBILITY}: {step.error}"] += 1

    def _is_dead_letter(self, fate: _Fate) -> bool:
        dlq = self.rig.sqs.queues[self.urls[fate.queue]].dlq
        body = fate.message._sent.body
        return dlq is not None and any(
            m.body == body and ATTRIBUTE_NAME in m.attributes for m in dlq.messages
        )

    def _has_ended(self, fate: _Fate) -> bool:
        """Return whether later messages of the group no longer wait for this message."""
        given_up = any(e.task_id == fate.message.task_id for e in self.rig.told("DeadLettered"))
        return fate.succeeded or given_up or fate.moved or self._is_dead_letter(fate)

    def _is_over(self) -> bool:
        return not any(self.rig.sqs.queues[url].messages for url in self.urls)

    def _judge_at_the_end(self) -> None:
        for fate in self.fates.values():
            is_in_queue = fate.message._sent in self.rig.sqs.queues[self.urls[fate.queue]].messages
            has_ended = fate.succeeded or fate.moved or self._is_dead_letter(fate)
            if not has_ended and not is_in_queue:
                self._say(f"{fate.key} is lost")
        if not self._is_over():
            left = [m for url in self.urls for m in self.rig.sqs.queues[url].messages]
            self._say(f"{len(left)} messages are still there, for example {left[0].id}")
        # SQS refuses a call with these texts if another worker has received or deleted the message.
        fine = ("receipt handle has expired", "does not exist")
        self.wrong += [no for no in self.rig.sqs.refusals if not any(each in no for each in fine)]
        self._judge_budget()

    def _judge_budget(self) -> None:
        calls = [c for c in self.rig.calls() if c.action not in ("ReceiveMessage", "SendMessage")]
        shortest = min(queue.visibility_timeout for queue in self.history.queues)
        renewals = self._held_seconds / (max(shortest, 9) / 3)
        faulty = sum(s.seconds + 10 for s in self.history.steps if isinstance(s, Fault))
        suspended = sum(isinstance(s, Suspend) for s in self.history.steps)
        receives = len(self._handles)
        budget = 60 + 4 * (self.runs + receives) + 2 * renewals + 4 * faulty + 20 * suspended
        budget += self.rig.timeline.now - BEGIN  # workers read queue attributes now and then
        if len(calls) > budget:
            self._say(f"{len(calls)} calls, where {budget:.0f} are enough")
        downs = [s for s in self.history.steps if isinstance(s, Down)]
        if self.history.has_provider and downs:
            enough = sum(2 * (6 + 4) + 4 + s.seconds / 2 for s in downs)
            enough += 14 * sum(isinstance(s, Kill | Stop) for s in self.history.steps)
            if self.calls_while_down > enough:
                self._say(f"{self.calls_while_down} calls while the provider was down")
