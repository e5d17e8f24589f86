"""Run random histories of one workflow that two messages, A and B, work on.

SQS delivers a message until its run ends well or gives it up. A run may be killed at any line of
our code for workflows. It may also be suspended for longer than its lease on the workflow, while
other runs and undoing tasks go on. A message that is given up sends the real task ``take_back``,
which undoes the steps of a workflow. A dead letter may be redriven. In some histories the queue is
FIFO, and all messages are in one group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import CodeType
from typing import Any
from unittest.mock import patch

from celery import Celery
from celery.app.task import Context
from celery.canvas import Signature

from celery_sqs_backoff.safe import SafeError, TryLater, take_back
from celery_sqs_backoff.safe.run import RunState
from celery_sqs_backoff.safe.workflow import Workflow
from celery_sqs_backoff.store.records import Record, Records
from celery_sqs_backoff.store.settings import records_of

from .kills import Killed, MortalStore, killed_after

LEASE = 300.0
STEPS = "abc"
SCOPE = "order:7"

_KERNEL = ("safe/document", "safe/workflow", "safe/lock", "safe/take_back", "store/records")
_WORK = ("act", "body")


class Refused(Exception):
    """The provider has refused a step, and certainly has not done it."""


class Lost(Exception):
    """The provider has done a step, but its response was lost."""


class Broken(AssertionError):
    """A promise was broken."""


@dataclass
class Run:
    """One delivery of a message."""

    number: int
    message: str
    began: float

    @property
    def id(self) -> str:
        return f"run {self.number}"


@dataclass
class Message:
    """The state of a message on the queue."""

    is_gone: bool = False
    is_dead_letter: bool = False
    receives: int = 0


@dataclass
class World:
    """A store, a clock, a queue, and the steps that were done and undone, for one history."""

    seed: int
    now: float = 1_000_000.0
    is_dead: bool = False
    done: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    undone_ids: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    queue: list[tuple[str, tuple[Any, ...], str]] = field(default_factory=list)
    gave_up: set[int] = field(default_factory=set)
    entered: dict[str, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    depth: int = 0
    #: A suspended run holds the workflow's lock until this time.
    inside_until: float = 0.0
    #: The message that last began a step. Empty if this is not known.
    answers: str = ""
    #: Steps of a workflow that has ended well, unless a run has begun them again since.
    settled: set[str] = field(default_factory=set)
    #: The ``take_back`` tasks that have sent an undoing task. Only one of them may do so.
    chains: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.store_fails = self.rng.choice([0.0, 0.0, 0.1])
        self.broker_fails = self.rng.choice([0.0, 0.0, 0.2])
        self.is_fifo = self.rng.random() < 0.15
        #: The probabilities that B is delivered and not A, that a run is killed, and so on.
        self.share_of_b = self.rng.choice([0.2, 0.5])
        self.kills = self.rng.choice([0.1, 0.5])
        self.suspends = self.rng.choice([0.3, 0.6])
        self.suspends_long = self.rng.choice([0.2, 0.6])
        #: The share of deliveries after which all undoing tasks in the queue run.
        self.works = self.rng.choice([0.0, 0.5])
        #: B may do one more step than A.
        self.steps = {"A": STEPS, "B": STEPS + self.rng.choice(["", "d"])}
        self.messages = {"A": Message(), "B": Message()}
        self.store = MortalStore(clock=lambda: self.now)
        self.store.world = self
        self.app = Celery("simulation", broker="memory://", set_as_current=False)
        self.app.conf.sqs_backoff = {"store": self.store, "secret": "simulation"}

    @property
    def records(self) -> Records:
        return records_of(self.app)

    def time(self) -> float:
        """Move the clock a little, and return the time.

        So the times at which a run begins and enters the workflow differ, as in reality.
        """
        self.now += 0.001
        return self.now

    # What a task does

    def act(self, name: str, run: Run, may_suspend: bool) -> str:
        if self.state() in ("closing", "closed"):
            raise Broken(f"the step {name} began after the workflow was closed")
        if self.now < self.inside_until:
            raise Broken("a run is in the workflow while another run holds its lock")
        self.answers = run.message
        self.settled.discard(name)
        self.perhaps_suspend(may_suspend)
        how = self.rng.random()
        if how < 0.12:
            raise Refused
        self.done.append(name)
        if how < 0.22:
            raise Lost
        return name

    def perhaps_suspend(self, may_suspend: bool) -> None:
        if may_suspend and self.depth < 3 and self.rng.random() < self.suspends:
            self.suspend(is_long=self.rng.random() < self.suspends_long)

    def suspend(self, *, is_long: bool) -> None:
        """Suspend this process while others go on. A long pause outlasts the run's lease."""
        self.happened["suspended"] += 1
        before = self.inside_until
        self.inside_until = before if is_long else self.now + LEASE - 20
        self.now += LEASE + 60 if is_long else 10
        is_dead, trace = self.is_dead, sys.gettrace()
        sys.settrace(None)
        try:
            for _ in range(self.rng.randint(0, 2)):
                self.in_another_process(lambda: self.deliver(self.draw()))
            if self.rng.random() < 0.8:
                self.in_another_process(self.work)
        finally:
            self.is_dead, self.inside_until = is_dead, before
            sys.settrace(trace)

    def draw(self) -> str:
        return "B" if self.rng.random() < self.share_of_b else "A"

    def in_another_process(self, act: Callable[[], object]) -> None:
        self.depth += 1
        try:
            act()
        finally:
            self.depth -= 1

    def body(self, run: Run, is_stale: bool) -> None:
        workflow = Workflow(
            self.records,
            SCOPE,
            RunState(of=run),
            message=run.message,
            lease=LEASE,
            is_certain=lambda exc: isinstance(exc, Refused),
        )
        with workflow as order:
            self.entered[run.message] = run.number
            self.perhaps_suspend(is_stale)
            for name in self.steps[run.message]:
                before, was_recorded = len(self.done), name in self.recorded
                order.step(
                    name,
                    self.act,
                    name,
                    run,
                    is_stale,
                    undo=Signature("undo", args=(name,), app=self.app),
                )
                if was_recorded and len(self.done) > before and not is_stale:
                    raise Broken(f"the step {name} was recorded, and done again")
                self.recorded.add(name)

    # Deliveries

    def deliver(self, name: str, *, is_last: bool = False) -> None:
        """Run a message once, and delete it, give it up, or let it come back."""
        message = self.messages[name]
        if self.is_fifo and name == "B" and not self.messages["A"].is_gone:
            return
        if message.is_gone:
            return
        message.receives += 1
        receive = message.receives
        number = self.happened["runs"] = self.happened["runs"] + 1
        run = Run(number, name, self.time())
        how = self.attempt(run, killable=not is_last)
        self.settled |= self.settled_now()
        # If SQS has delivered the message again in the meantime, only the later run settles it.
        is_latest = receive == message.receives
        is_given_up = how == "gives up" or (how == "comes back" and (is_last or receive > 6))
        if is_given_up:
            self.give_up(run)
        if is_latest and (is_given_up or how == "ended"):
            message.is_gone, message.is_dead_letter = True, is_given_up
            self.pending.discard(self.entered.get(name, 0))
        elif how != "ended" and not is_given_up and not message.is_gone:
            self.pending.add(number)

    def redrive(self, name: str) -> None:
        """Send a dead letter again, as a new message with the same task ID."""
        if self.messages[name].is_dead_letter:
            self.happened["redriven"] += 1
            self.messages[name] = Message()

    def give_up(self, run: Run) -> None:
        self.gave_up.add(run.number)
        task_id = f"{self.happened['given up']}"
        self.happened["given up"] += 1
        self.queue.append(("take back", (run.message, run.id, run.began), task_id))

    def attempt(self, run: Run, *, killable: bool) -> str:
        is_killed = killable and self.rng.random() < self.kills
        lines = self.rng.randint(1, 500) if is_killed else 0
        is_stale = killable and self.rng.random() < 0.8
        try:
            killed_after(lines, self, lambda: self.body(run, is_stale), where=_counts)
        except (Killed, TryLater) as exc:
            self.happened["killed"] += isinstance(exc, Killed)
            if self.answers != run.message:
                self.answers = ""  # the run may have begun a step that act() has not seen
            return "comes back"
        except Refused:
            return "comes back" if self.rng.random() < 0.5 else "gives up"
        except (Lost, SafeError):
            return "gives up"
        return "ended"

    # The queue of take_back and of undoing tasks

    def work(self) -> None:
        """Run the tasks that undo the workflow. On a FIFO queue they come after both A and B."""
        if self.is_fifo and not all(message.is_gone for message in self.messages.values()):
            return
        for _ in range(200):
            if not self.queue:
                return
            kind, args, task_id = self.queue.pop(0)
            if kind == "undo":
                name, link, chain = args
                if task_id not in self.undone_ids:
                    self.undone.append(name)
                    self.undone_ids.add(task_id)
                self.queue.append(("take back", link, f"{chain}, after {name}"))
                continue
            self.take_back(args, task_id)
        raise Broken("the undoing tasks never end")

    def take_back(self, args: tuple[Any, ...], task_id: str) -> None:
        lines = self.rng.randint(1, 200) if self.rng.random() < 0.2 * bool(self.depth < 9) else 0
        lines = lines if self.store_fails or self.broker_fails or self.rng.random() < 0.5 else 0
        before = self.state()
        act = partial(take_back._take_back, Bound(self, task_id), *args)
        try:
            killed_after(lines, self, act, where=_counts)
        except (Killed, TryLater):
            self.queue.append(("take back", args, task_id))
            self.now += 61
        if before == "open" and self.state() in ("closing", "closed"):
            if self.answers and args[0] != self.answers:
                raise Broken(
                    f"{args[0]} undoes the workflow, but {self.answers} began its last step"
                )
            if self.now < self.inside_until:
                raise Broken("the workflow is undone while a run holds its lock")
            latest = self.entered.get(args[0])
            if latest is not None and latest in self.pending:
                raise Broken("the workflow is undone although its message comes back")

    def state(self) -> str:
        there = self.peek()
        return "" if there is None else str(there.fields["state"])

    def settled_now(self) -> set[str]:
        there = self.peek()
        return set(self.done) if there is not None and there.fields.get("ended") else set()

    def peek(self) -> Record | None:
        is_dead, self.is_dead = self.is_dead, False
        fails, self.store_fails = self.store_fails, 0.0
        try:
            return self.records.get("scope", SCOPE)
        finally:
            self.is_dead, self.store_fails = is_dead, fails


class Bound:
    """Stands for the bound task that ``take_back`` gets as ``self``."""

    def __init__(self, world: World, task_id: str) -> None:
        self.app, self.request = world.app, Context(id=task_id)

    def si(self, *args: Any) -> Signature:
        chain = self.request.id.partition(",")[0]
        return Signature("take back", args=args, app=self.app, options={"chain": chain})


def _counts(code: CodeType) -> bool:
    is_work = code.co_filename == __file__ and code.co_name in _WORK
    return is_work or any(part in code.co_filename for part in _KERNEL)


def play(seed: int) -> Counter[str]:
    """Run one history, and return how often each thing has happened in it.

    Raises:
        Broken: a promise was broken.
    """
    world = World(seed)

    def apply_async(self: Any, **options: Any) -> None:
        if world.is_dead:
            raise Killed
        if world.rng.random() < world.broker_fails:
            raise ConnectionError
        task_id, [link] = str(self.options["task_id"]), self.options["link"]
        chain = link["options"]["chain"]
        world.queue.append(("undo", (self.args[-1], tuple(link["args"]), chain), task_id))
        world.chains.add(chain)
        if world.rng.random() < world.broker_fails / 2:
            raise ConnectionError  # the broker has taken the task, but its response is lost

    def in_a_process(act: Callable[[], object]) -> None:
        world.in_another_process(act)

    with (
        patch.object(Signature, "apply_async", apply_async),
        patch("celery_sqs_backoff.safe.lock.time", world),
        patch("celery_sqs_backoff.safe.document.time", world),
    ):
        for _ in range(world.rng.randint(1, 8)):
            in_a_process(lambda: world.deliver(world.draw()))
            if world.rng.random() < world.works:
                in_a_process(world.work)
            world.now += world.rng.choice([1, LEASE + 100])
            if world.rng.random() < 0.2:
                world.redrive(world.rng.choice("AB"))
        world.store_fails = world.broker_fails = 0.0
        order = "AB" if world.is_fifo else world.rng.choice(["AB", "BA"])
        for name in order:  # deliver each message a last time, after which it never comes back
            world.now += LEASE + 100
            in_a_process(lambda name=name: world.deliver(name, is_last=True))
        world.now += LEASE + 100
        in_a_process(world.work)
        judge(world)
    return world.happened


def judge(world: World) -> None:
    """Check the promises when all messages have left the queue and all undoing tasks have run."""
    there = world.peek()
    if there is None:
        if world.done:
            raise Broken(f"done {world.done}, and no record")
        return
    fields, settled = there.fields, world.settled | world.settled_now()
    if undone := settled & set(world.undone):
        raise Broken(f"the workflow has ended, and {undone} was undone")
    if fields.get("ended"):
        if fields["state"] != "open":
            raise Broken("the workflow has ended, and was taken back")
        world.happened["ended"] += 1
    elif not set(world.done) <= set(world.undone) | settled:
        raise Broken(f"done {world.done}, undone {world.undone}, {fields['state']}")
    else:
        world.happened["taken back"] += 1
    if len(world.chains) > 1:
        raise Broken("two chains of undoing tasks")
    first = list(dict.fromkeys(world.undone))
    if first != sorted(first, reverse=True):
        raise Broken(f"undone in the order {first}")
    world.happened["effects"] += len(world.done)
