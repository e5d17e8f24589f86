"""If an outage goes on: when does the first message give up, and how many by when?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .engine import simulate
from .scenario import Arrivals, Kind, Phase, Scenario, ScenarioError, Script
from .strategies import STRATEGIES

__all__ = ["Forecast", "forecast", "scenario_of_queue"]

#: A larger backlog is sampled: its messages do not influence one another while all calls fail.
MOST_SIMULATED = 5_000

#: Shares of the messages whose giving up is dated.
SHARES = (0.01, 0.1, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What happens if the outage goes on. Times are seconds from now.

    Attributes:
        messages: in the queue now.
        first: when the first gives up; ``None`` = none does within ``horizon``.
        given_up: (time, messages that have given up by then), at some points.
        reasons: how many give up, by reason.
        horizon: how far the forecast looks.
    """

    messages: int
    first: float | None
    given_up: list[tuple[float, int]]
    reasons: dict[str, int]
    horizon: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def scenario_of_queue(
    scenario: Scenario,
    attributes: Mapping[str, str],
    *,
    max_receive_count: int | None,
    oldest: float = 0.0,
) -> Scenario:
    """Put a queue's numbers in a scenario whose provider is down from now on.

    Args:
        scenario: the task, the fleet and the rate of new messages.
        attributes: as GetQueueAttributes returns them.
        max_receive_count: of the redrive policy; ``None`` = the queue has no dead-letter queue.
        oldest: age in seconds of the oldest message; the others are spread evenly below it.

    Raises:
        ScenarioError: the queue would not have kept the oldest message.
    """
    stem = "ApproximateNumberOfMessages"
    depth = sum(int(attributes.get(stem + part, 0)) for part in ("", "NotVisible", "Delayed"))
    retention = float(attributes.get("MessageRetentionPeriod", scenario.retention))
    if oldest > retention:
        raise ScenarioError(
            f"oldest={oldest:g} s: the queue keeps its messages for {retention:g} s at the most"
        )
    budgets = [retention]
    if scenario.task.retry_for is not None:
        budgets.append(scenario.task.retry_for)
    horizon = min(budgets) + 2 * scenario.task.backoff.ceiling(1000)
    return replace(
        scenario,
        script=Script(
            call_seconds=scenario.script.call_seconds,
            failed_call_seconds=scenario.script.failed_call_seconds,
            phases=(Phase(kind=Kind.OUTAGE, start=0.0, lasts=2 * horizon),),
        ),
        arrivals=Arrivals(rate=0.0, lasts=0.0, backlog=depth, oldest=oldest),
        max_receive_count=max_receive_count,
        retention=retention,
        horizon=horizon,
    )


def forecast(scenario: Scenario, *, strategy: str = "full-jitter", seed: int = 0) -> Forecast:
    """Simulate the messages that are there now under an outage that does not end."""
    depth = scenario.arrivals.backlog
    sampled = min(depth, MOST_SIMULATED)
    factor = depth / sampled if sampled else 1.0
    arrivals = replace(scenario.arrivals, backlog=sampled)
    measures = simulate(replace(scenario, arrivals=arrivals), STRATEGIES[strategy], seed=seed)
    given_up, so_far, shares = [], 0, list(SHARES)
    for at, number in enumerate(measures.dead_curve.counts):
        so_far += number
        while shares and so_far >= shares[0] * sampled and so_far:
            shares.pop(0)
            until = (at + 1) * measures.dead_curve.seconds
            given_up.append((until, round(so_far * factor)))
    return Forecast(
        messages=depth,
        first=measures.first_dead_at,
        given_up=sorted(set(given_up)),
        reasons={reason: round(number * factor) for reason, number in measures.dead.items()},
        horizon=scenario.horizon or measures.ended_at,
    )
