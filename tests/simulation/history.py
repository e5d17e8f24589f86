"""Histories as data: what is sent, which calls fail, who is killed. They can be replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "Down",
    "Fault",
    "History",
    "Kill",
    "KillInRecall",
    "QueueSpec",
    "RecallPoint",
    "Send",
    "Stall",
    "Step",
    "draw",
    "draw_with_provider",
]

#: Seconds in which messages are sent and things go wrong; then all works again.
TROUBLE_SECONDS = 150.0

ACTIONS = ("ChangeMessageVisibilityBatch", "DeleteMessageBatch", "SendMessageBatch")

#: How a call fails: as in tests/support/fault_proxy.
HOW = (
    "unreachable",
    "lost response",
    "throttled",
    "internal error",
    "expired token",
    "denied",
    "entries",
    "runtime error",
    "slow",
)


@dataclass(frozen=True)
class QueueSpec:
    name: str
    fifo: bool = False
    visibility_timeout: int = 30
    max_receive_count: int = 1_000


@dataclass(frozen=True)
class Send:
    """A message whose runs end so, one after the other, each after some seconds; then well."""

    at: float
    queue: int
    group: str
    runs: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Fault:
    """Calls of one action about one queue fail for a while."""

    at: float
    seconds: float
    queue: int
    action: str
    how: str

    @property
    def is_done(self) -> bool:
        """Whether SQS may do it all the same."""
        return self.how in ("slow", "lost response", "entries")


@dataclass(frozen=True)
class Kill:
    """A worker is gone, SIGKILL; another takes its place a second later."""

    at: float
    worker: int


@dataclass(frozen=True)
class Stall:
    """A worker stands still (a suspended machine); its clock does not."""

    at: float
    worker: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    """A worker is stopped, SIGTERM; another takes its place when it has ended."""

    at: float
    worker: int


@dataclass(frozen=True)
class Down:
    """The provider is down for a while. Needs a history with a provider."""

    at: float
    seconds: float
    retry_after: float | None = None


class RecallPoint(str, Enum):
    """Between which two lines of a recall."""

    TAKEN = "taken"
    SENT = "sent"
    ARRIVED = "arrived"

    def __repr__(self) -> str:
        return f"RecallPoint.{self.name}"


@dataclass(frozen=True)
class KillInRecall:
    """Whichever worker makes the recall call of that number is killed at a point of it."""

    number: int
    point: RecallPoint
    at: float = 0.0


Step = Send | Fault | Kill | Stall | Stop | Down | KillInRecall


@dataclass(frozen=True)
class History:
    queues: tuple[QueueSpec, ...]
    steps: tuple[Step, ...] = field(default=())
    has_provider: bool = False

    def script(self) -> str:
        """Return a Python script that replays the history."""
        lines = [f"    {step!r}," for step in sorted(self.steps, key=lambda step: step.at)]
        return "\n".join(
            [
                "from tests.simulation.history import *",
                "from tests.simulation.world import run",
                "",
                f"history = History({self.queues!r}, (",
                *lines,
                f"), has_provider={self.has_provider})",
                "print(run(history).wrong)",
            ]
        )


def draw(seed: int) -> History:
    """Draw a history: two queues, a few dozen runs, up to five faults."""
    rng = random.Random(seed)
    queues = tuple(
        QueueSpec(
            name,
            fifo=rng.random() < 0.3,
            visibility_timeout=rng.choice((30, 30, 9, 120)),
            max_receive_count=rng.choice((1_000, 1_000, 5)),
        )
        for name in "ab"
    )
    steps: list[Step] = []
    for _ in range(rng.randint(1, 9)):
        at, queue = round(rng.uniform(0, TROUBLE_SECONDS), 2), rng.randrange(2)
        for _ in range(rng.choice((1, 1, 2, 5))):
            steps.append(Send(at, queue, rng.choice("xyz"), _runs(rng)))
    busy = [step.at + rng.choice((0.0, 0.05, 2.0, 9.5)) for step in steps]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        # Where nothing happens nothing can go wrong.
        at = rng.choice((rng.uniform(0, TROUBLE_SECONDS), rng.choice(busy) - 0.5))
        steps.append(
            Fault(
                at=round(max(0.0, at), 2),
                seconds=rng.choice((1.0, 3.0, 3.0, 40.0, 150.0)),
                queue=rng.randrange(2),
                action=rng.choice(ACTIONS),
                how=rng.choice(HOW),
            )
        )
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        steps.append(Kill(round(rng.uniform(0, TROUBLE_SECONDS), 2), rng.randrange(2)))
    for _ in range(rng.choice((0, 0, 0, 1))):
        at = round(rng.uniform(0, TROUBLE_SECONDS), 2)
        steps.append(Stall(at, rng.randrange(2), rng.choice((5.0, 50.0, 400.0))))
    return History(queues, tuple(steps))


def _runs(rng: random.Random) -> tuple[tuple[str, float, float], ...]:
    """How, after how many seconds, and with which delay."""
    runs = []
    while rng.random() < 0.35:
        how = rng.choice(("retry", "retry", "retry", "give up", "release", "crash"))
        runs.append((how, rng.choice((0.05, 0.05, 2.0, 70.0)), rng.choice((1.0, 20.0, 200.0))))
    return (*runs, ("success", rng.choice((0.05, 0.05, 0.05, 3.0, 50.0)), 0.0))


def draw_with_provider(seed: int) -> History:
    """Draw a history of a provider that is down once or twice, and of who is killed in a recall."""
    rng = random.Random(f"provider {seed}")
    queues = tuple(
        QueueSpec(
            name,
            fifo=rng.random() < 0.2,
            visibility_timeout=rng.choice((30, 30, 9, 120)),
            max_receive_count=rng.choice((1_000, 1_000, 12)),
        )
        for name in "ab"
    )
    steps: list[Step] = []
    downs = [round(rng.uniform(0, 60), 2), round(rng.uniform(80, 140), 2)][: rng.choice((1, 1, 2))]
    for at in downs:
        seconds = rng.choice((8.0, 20.0, 60.0, 120.0))
        steps.append(Down(at, seconds, rng.choice((None, None, 15.0, 90.0))))
    for _ in range(rng.randint(2, 8)):
        at = round(max(0.0, rng.choice(downs) + rng.uniform(-10, 70)), 2)
        queue = rng.randrange(2)
        for _ in range(rng.choice((1, 3, 8))):
            steps.append(Send(at, queue, rng.choice("xyz"), _short_runs(rng)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        steps.append(
            Fault(
                at=round(max(0.0, rng.choice(downs) + rng.uniform(0, 90)), 2),
                seconds=rng.choice((1.0, 3.0, 40.0)),
                queue=rng.randrange(2),
                action=rng.choice((*ACTIONS, "ChangeMessageVisibilityBatch")),
                how=rng.choice((*HOW, "lost response")),
            )
        )
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        steps.append(KillInRecall(rng.choice((1, 1, 2, 3, 5)), rng.choice(list(RecallPoint))))
    if rng.random() < 0.2:
        steps.append(Kill(round(rng.uniform(0, TROUBLE_SECONDS), 2), rng.randrange(2)))
    if rng.random() < 0.15:
        at = round(rng.uniform(0, TROUBLE_SECONDS), 2)
        steps.append(Stall(at, rng.randrange(2), rng.choice((5.0, 50.0))))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        at = round(max(0.0, rng.choice(downs) + rng.uniform(0, 90)), 2)
        steps.append(Stop(at, rng.randrange(2)))
    return History(queues, tuple(steps), has_provider=True)


def _short_runs(rng: random.Random) -> tuple[tuple[str, float, float], ...]:
    runs = []
    while rng.random() < 0.1:
        how = rng.choice(("retry", "give up", "release", "crash"))
        runs.append((how, rng.choice((0.05, 2.0)), rng.choice((1.0, 20.0, 200.0))))
    return (*runs, ("success", rng.choice((0.05, 0.2, 2.0)), 0.0))
