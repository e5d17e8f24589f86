"""The figures of a simulation that people compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from .measures import Call, Measures, percentile
from .scenario import Scenario

__all__ = ["USD_PER_MILLION_REQUESTS", "Result", "result_of"]

#: Standard queues, us-east-1, beyond the free million a month.
#: https://aws.amazon.com/sqs/pricing/ (a batch of up to 64 KB is one request)
USD_PER_MILLION_REQUESTS: Final = 0.40


@dataclass(frozen=True, kw_only=True)
class Result:
    """One strategy in one scenario. Times are seconds; ``None`` is not known, never zero.

    Attributes:
        strategy: its name.
        messages: how many were sent.
        calls: of the provider, all.
        wasted: calls that failed because the provider was down.
        turned_away: calls refused because the provider takes no more a second.
        receives_p50, receives_p99, receives_max: receives per settled message.
        dead: messages that were given up, by reason.
        unsettled: messages that were not settled when the simulation ended.
        in_flight_peak: most messages in flight; SQS allows 120,000.
        backlog: unsettled messages when the provider recovered.
        drain: from the recovery until the last of them was settled.
        drain_limit: backlog / (what the provider and the fleet take - new messages).
        first_dead_at: when the first message was given up.
        requests: to SQS, by action; an estimate of batches and idle polls.
        usd: their price.
        curves: calls a second over time, by how they ended.
    """

    strategy: str
    messages: int
    calls: int
    wasted: int
    turned_away: int
    receives_p50: int
    receives_p99: int
    receives_max: int
    dead: dict[str, int]
    unsettled: int
    in_flight_peak: int
    backlog: int
    drain: float | None
    drain_limit: float | None
    first_dead_at: float | None
    requests: dict[str, int]
    usd: float
    curves: dict[str, list[tuple[float, float]]]

    @property
    def drain_ratio(self) -> float | None:
        """Drain time as a multiple of its limit; ``None`` = there was no backlog to speak of."""
        if self.drain is None or not self.drain_limit or self.drain_limit < 1:
            return None
        return self.drain / self.drain_limit

    def as_dict(self) -> dict[str, Any]:
        """Return what ``sqs-simulate --json`` prints."""
        return {**asdict(self), "drain_ratio": self.drain_ratio}


def result_of(strategy: str, scenario: Scenario, measures: Measures) -> Result:
    """Fold a simulation's counts into its figures."""
    requests = {request.value: number for request, number in measures.requests.items()}
    settled = sum(measures.receives.values())
    drained_at = measures.drained_at
    has_phases = bool(scenario.script.phases)
    return Result(
        strategy=strategy,
        messages=measures.messages,
        calls=sum(measures.calls.values()),
        wasted=measures.calls[Call.WASTED],
        turned_away=measures.calls[Call.TURNED_AWAY],
        receives_p50=percentile(measures.receives, 0.5),
        receives_p99=percentile(measures.receives, 0.99),
        receives_max=max(measures.receives, default=0),
        dead=dict(measures.dead),
        unsettled=measures.messages - settled,
        in_flight_peak=measures.in_flight_peak,
        backlog=measures.backlog_at_recovery,
        drain=None
        if drained_at is None or not has_phases
        else drained_at - scenario.script.recovered_at,
        drain_limit=_drain_limit(scenario, measures.backlog_at_recovery) if has_phases else None,
        first_dead_at=measures.first_dead_at,
        requests=requests,
        usd=sum(requests.values()) / 1e6 * USD_PER_MILLION_REQUESTS,
        curves={call.value: curve.per_second() for call, curve in measures.curves.items()},
    )


def _drain_limit(scenario: Scenario, backlog: int) -> float | None:
    """The shortest time in which a backlog can be sent; ``None``: it never can."""
    arrivals, capacity = scenario.arrivals, scenario.throughput
    fresh_for = max(0.0, arrivals.lasts - scenario.script.recovered_at)
    spare = capacity - arrivals.rate
    if spare > 0 and backlog <= spare * fresh_for:
        return backlog / spare
    return (backlog + arrivals.rate * fresh_for) / capacity
