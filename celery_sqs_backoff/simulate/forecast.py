"""Say when messages give up if an outage goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .engine import simulate
from .law import STRATEGIES
from .scenario import Scenario, ScenarioError

#: A larger backlog is sampled: its messages do not influence one another while all calls fail.
_MOST_SIMULATED = 5_000

#: Shares of the messages whose giving up is dated.
_SHARES = (0.01, 0.1, 0.5, 0.9)


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


def forecast(
    scenario: Scenario,
    attributes: Mapping[str, str],
    *,
    max_receive_count: int | None,
    oldest: float = 0.0,
    strategy: str = "full-jitter",
    seed: int = 0,
) -> Forecast:
    """Simulate the messages of a queue under an outage that does not end.

    Args:
        scenario: the fleet and the task's options.
        attributes: of the queue, as GetQueueAttributes returns them.
        max_receive_count: of its redrive policy; ``None`` = it has no dead-letter queue.
        oldest: age in seconds of the oldest message; the others are spread evenly below it.
        strategy: how the messages wait.
        seed: another one gives another draw.

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
    ends = retention if scenario.retry_for is None else min(retention, scenario.retry_for)
    horizon = ends + 2 * scenario.backoff.ceiling(1000)
    sampled = min(depth, _MOST_SIMULATED)
    begun = replace(
        scenario,
        outage=2 * horizon,
        rate=0.0,
        backlog=sampled,
        oldest=oldest,
        max_receive_count=max_receive_count,
        retention=retention,
        horizon=horizon,
    )
    measures = simulate(begun, STRATEGIES[strategy], seed=seed)
    factor = depth / sampled if sampled else 1.0
    given_up, so_far, shares = [], 0, list(_SHARES)
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
        horizon=horizon,
    )
