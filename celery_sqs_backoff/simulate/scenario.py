"""What is simulated: a provider's script, the messages, the fleet and the task's options.

All times are seconds from the start of the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from ..provider.health import Thresholds
from ..provider.recall import DEFAULT_LIMIT
from ..retry.policies import FullJitter, Policy

__all__ = ["Arrivals", "Fleet", "Kind", "Phase", "Scenario", "ScenarioError", "Script", "Task"]


class ScenarioError(ValueError):
    """A scenario does not make sense; the message names the key and what was expected."""


class Kind(str, Enum):
    """How the provider behaves during a phase."""

    #: Every call fails.
    OUTAGE = "outage"
    #: A share of the calls fails.
    BROWNOUT = "brownout"
    #: Every call succeeds, slowly.
    SLOW = "slow"
    #: It takes fewer calls a second than usual.
    THROTTLED = "throttled"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A time in which the provider does not behave as usual.

    Attributes:
        kind: what is different.
        start: seconds from the start of the simulation.
        lasts: seconds.
        share: of failing calls in a brown-out, 0 to 1.
        capacity: calls a second that it takes; ``None`` = as always.
        call_seconds: how long a call takes; ``None`` = as always.
    """

    kind: Kind
    start: float
    lasts: float
    share: float = 0.5
    capacity: float | None = None
    call_seconds: float | None = None

    def __post_init__(self) -> None:
        _above_0("phase.lasts", self.lasts)
        _from_0("phase.start", self.start)
        if not 0 <= self.share <= 1:
            raise ScenarioError(f"phase.share={self.share!r}: expected a share from 0 to 1")
        if self.capacity is not None:
            _above_0("phase.capacity", self.capacity)

    @property
    def end(self) -> float:
        return self.start + self.lasts

    @property
    def share_failing(self) -> float:
        if self.kind is Kind.OUTAGE:
            return 1.0
        return self.share if self.kind is Kind.BROWNOUT else 0.0


@dataclass(frozen=True, kw_only=True)
class Script:
    """The provider: how it behaves as a rule, and its phases.

    Attributes:
        capacity: calls a second that it takes; more get a 429. ``None`` = any number.
        burst: calls that it takes at once after a pause; ``None`` = a second's worth.
        call_seconds: how long a successful call takes.
        failed_call_seconds: how long a call that fails takes (a timeout, for example).
        retry_after: seconds that a 429 asks for; ``None`` = it says nothing.
        phases: must not overlap.
    """

    capacity: float | None = 20.0
    burst: float | None = None
    call_seconds: float = 0.2
    failed_call_seconds: float = 0.2
    retry_after: float | None = None
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity is not None:
            _above_0("provider.capacity", self.capacity)
        if self.burst is not None:
            _from_0("provider.burst", self.burst)
        _above_0("provider.call_seconds", self.call_seconds)
        _above_0("provider.failed_call_seconds", self.failed_call_seconds)
        ordered = tuple(sorted(self.phases, key=lambda phase: phase.start))
        for earlier, later in pairwise(ordered):
            if later.start < earlier.end:
                raise ScenarioError(
                    f"provider.phases: expected phases that do not overlap, but one starts at"
                    f" {later.start:g} s and the one before it ends at {earlier.end:g} s"
                )
        object.__setattr__(self, "phases", ordered)

    @property
    def recovered_at(self) -> float:
        """When the last phase ends; 0 = there is none."""
        return max((phase.end for phase in self.phases), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """New messages: ``rate`` a second from 0 to ``lasts``, at random times, and a backlog at 0.

    The messages of the backlog were first received up to ``oldest`` seconds ago, spread evenly, and
    have been retried since.
    """

    rate: float = 1.0
    lasts: float = 7200.0
    backlog: int = 0
    oldest: float = 0.0

    def __post_init__(self) -> None:
        _from_0("messages.rate", self.rate)
        _from_0("messages.lasts", self.lasts)
        _from_0("messages.backlog", self.backlog)
        _from_0("messages.oldest", self.oldest)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The workers.

    Attributes:
        workers: how many.
        processes: of each worker.
        prefetch: messages per process that a worker takes beyond those that run; 0 = none.
    """

    workers: int = 10
    processes: int = 4
    prefetch: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "processes"):
            if getattr(self, name) < 1:
                raise ScenarioError(f"fleet.{name}: expected a whole number from 1 up")
        _from_0("fleet.prefetch", self.prefetch)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The options that matter here; see docs/options.md. Times are seconds."""

    backoff: Policy = field(default_factory=FullJitter)
    retry_for: float | None = 36 * 3600.0
    max_retries: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    crash_budget: int = 3
    remember: int = DEFAULT_LIMIT
    #: Of Celery's ``autoretry_for``, for the comparison: its own defaults.
    autoretry_max_retries: int = 3
    autoretry_backoff_max: float = 600.0

    def __post_init__(self) -> None:
        _from_0("task.remember", self.remember)
        if self.crash_budget < 1:
            raise ScenarioError("task.crash_budget: expected a whole number from 1 up")
        if self.max_retries is not None:
            _from_0("task.max_retries", self.max_retries)
        _from_0("task.autoretry_max_retries", self.autoretry_max_retries)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a simulation needs but its seed and its strategy.

    Attributes:
        max_receive_count: of the queue's redrive policy; ``None`` = no dead-letter queue.
        retention: seconds that SQS keeps a message.
        horizon: the simulation stops here; ``None`` = when all messages are settled.
    """

    name: str = "outage"
    script: Script = field(default_factory=Script)
    arrivals: Arrivals = field(default_factory=Arrivals)
    fleet: Fleet = field(default_factory=Fleet)
    task: Task = field(default_factory=Task)
    max_receive_count: int | None = None
    retention: float = 4 * 86_400.0
    horizon: float | None = None

    def __post_init__(self) -> None:
        if self.max_receive_count is not None and self.max_receive_count < 1:
            raise ScenarioError("queue.max_receive_count: expected a whole number from 1 up")
        _above_0("queue.retention", self.retention)

    @property
    def throughput(self) -> float:
        """Calls a second that the fleet makes and the provider takes, at the most."""
        made = self.fleet.workers * self.fleet.processes / self.script.call_seconds
        return made if self.script.capacity is None else min(made, self.script.capacity)

    def with_task(self, **changes: object) -> Scenario:
        return replace(self, task=replace(self.task, **changes))  # type: ignore[arg-type]


def _above_0(name: str, value: float) -> None:
    if not value > 0:
        raise ScenarioError(f"{name}={value!r}: expected a number above 0")


def _from_0(name: str, value: float) -> None:
    if not value >= 0:
        raise ScenarioError(f"{name}={value!r}: expected a number from 0 up")
