"""Define and check the scenario of a simulation. All times are seconds from its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..provider.settings import Provider
from ..retry.policies import FullJitter, Policy


class ScenarioError(ValueError):
    """A field of a scenario is invalid. The text names the field and the expected values."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An outage of a provider, the messages for it, the fleet and the task's options.

    Attributes:
        outage: seconds that the provider is down, from time 0.
        rate: new messages a second until the end of the outage, at random times.
        backlog: number of messages at the start.
        capacity: calls a second that the provider accepts. It answers further calls with 429.
            ``None`` = no limit.
        call_seconds: seconds that a call takes.
        retry_after: seconds in the Retry-After of a 429; ``None`` = it has no Retry-After.
        workers: number of workers.
        processes: number of processes of each worker.
        prefetch: messages per process that a worker receives in addition to the running ones.
        backoff, retry_for, max_retries, crash_budget, provider: the task's options.
        max_receive_count: the queue's ``maxReceiveCount``; ``None`` = the queue has no dead-letter
            queue.
        retention: seconds that SQS keeps a message.
    """

    outage: float = 3600.0
    rate: float = 1.0
    backlog: int = 0
    capacity: float | None = 20.0
    call_seconds: float = 0.2
    retry_after: float | None = None
    workers: int = 10
    processes: int = 4
    prefetch: int = 0
    backoff: Policy = field(default_factory=FullJitter)
    retry_for: float | None = 36 * 3600.0
    max_retries: int | None = None
    crash_budget: int = 3
    provider: Provider = field(default_factory=lambda: Provider("simulated"))
    max_receive_count: int | None = None
    retention: float = 4 * 86_400.0

    def __post_init__(self) -> None:
        for name in ("outage", "rate", "backlog", "prefetch"):
            if not getattr(self, name) >= 0:
                raise ScenarioError(f"invalid {name} {getattr(self, name)!r}: expected 0 or more")
        for name in ("capacity", "call_seconds", "workers", "processes", "retention"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ScenarioError(f"invalid {name} {value!r}: expected more than 0")

    @property
    def throughput(self) -> float:
        """Largest number of calls a second that the fleet can make and the provider accepts."""
        made = self.workers * self.processes / self.call_seconds
        return made if self.capacity is None else min(made, self.capacity)
