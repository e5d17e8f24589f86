"""Define the scenario of a simulation. All times are seconds from the simulation's start."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..retry.options import Options


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An outage of a provider, the messages for it, the fleet and the task's options.

    Attributes:
        outage: seconds that the provider is down, from time 0.
        rate: new messages a second until the end of the outage, at random times.
        backlog: number of messages at the start.
        capacity: calls a second that the provider accepts. It answers further calls with 429.
        call_seconds: seconds that a call takes, above 0.
        workers: number of workers.
        processes: number of processes of each worker.
        prefetch: messages per process that a worker receives in addition to the running ones.
        options: the task's options.
        max_receive_count: the queue's ``maxReceiveCount``; ``None`` = the queue has no dead-letter
            queue.
    """

    outage: float = 3600.0
    rate: float = 1.0
    backlog: int = 0
    capacity: float = 20.0
    call_seconds: float = 0.2
    workers: int = 10
    processes: int = 4
    prefetch: int = 0
    options: Options = field(default_factory=Options)
    max_receive_count: int | None = None

    @property
    def window(self) -> int:
        """Largest number of messages that a worker holds."""
        return self.processes * (1 + self.prefetch)

    @property
    def throughput(self) -> float:
        """Largest number of calls a second that the fleet can make and the provider accepts."""
        return min(self.workers * self.processes / self.call_seconds, self.capacity)
