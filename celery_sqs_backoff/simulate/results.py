"""The figures of a simulation that people compare, as a table and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from ..units import spell_duration
from .engine import Call, Measures
from .scenario import Scenario


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
        drain_limit: the shortest time in which they can be settled.
        first_dead_at: when the first message was given up.
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
    drain = drain_limit = None
    if scenario.outage:
        drain_limit = _drain_limit(scenario, measures.backlog_at_recovery)
        if measures.drained_at is not None:
            drain = measures.drained_at - scenario.outage
    return Result(
        strategy=strategy,
        messages=measures.messages,
        calls=sum(map(measures.count_calls, Call)),
        wasted=measures.count_calls(Call.WASTED),
        turned_away=measures.count_calls(Call.TURNED_AWAY),
        receives_p50=_percentile(measures.receives, 0.5),
        receives_p99=_percentile(measures.receives, 0.99),
        receives_max=max(measures.receives, default=0),
        dead=dict(measures.dead),
        unsettled=measures.messages - sum(measures.receives.values()),
        in_flight_peak=measures.in_flight_peak,
        backlog=measures.backlog_at_recovery,
        drain=drain,
        drain_limit=drain_limit,
        first_dead_at=measures.first_dead_at,
        curves={
            call.value: [(i * c.seconds, n / c.seconds) for i, n in enumerate(c.counts)]
            for call, c in measures.calls.items()
        },
    )


def _drain_limit(scenario: Scenario, backlog: int) -> float:
    capacity = scenario.throughput
    fresh_for = max(0.0, scenario.last_arrival - scenario.outage)
    spare = capacity - scenario.rate
    if spare > 0 and backlog <= spare * fresh_for:
        return backlog / spare
    return (backlog + scenario.rate * fresh_for) / capacity


def _percentile(histogram: Counter[int], share: float) -> int:
    """Return the smallest value that at least ``share`` of the entries do not exceed."""
    total, seen = sum(histogram.values()), 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= share * total:
            return value
    return 0


def render(results: Sequence[Result]) -> str:
    """Return a table with a column for each strategy."""
    width = max(12, *(len(result.strategy) for result in results))
    rows = [
        ("", [r.strategy for r in results]),
        ("messages", [f"{r.messages:,}" for r in results]),
        ("calls of the provider", [f"{r.calls:,}" for r in results]),
        ("  wasted: it was down", [f"{r.wasted:,}" for r in results]),
        ("  turned away: too many", [f"{r.turned_away:,}" for r in results]),
        ("dead letters", [f"{sum(r.dead.values()):,}" for r in results]),
        ("not settled in time", [f"{r.unsettled:,}" for r in results]),
        ("time to drain", [_duration(r.drain) for r in results]),
        ("  shortest possible", [_duration(r.drain_limit) for r in results]),
        ("  times that", ["-" if (x := r.drain_ratio) is None else f"{x:.2f}x" for r in results]),
        ("receives, median", [f"{r.receives_p50:,}" for r in results]),
        ("receives, 99 of 100", [f"{r.receives_p99:,}" for r in results]),
        ("receives, most", [f"{r.receives_max:,}" for r in results]),
        ("most in flight", [f"{r.in_flight_peak:,}" for r in results]),
        ("  of SQS's quota", [f"{r.in_flight_peak / MAX_IN_FLIGHT_MESSAGES:.1%}" for r in results]),
    ]
    lines = [
        f"{label:<24}" + "  ".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows
    ]
    for result in results:
        for reason, number in sorted(result.dead.items()):
            lines.append(f"{result.strategy}: {number:,} dead letters: {reason}")
    return "\n".join(line.rstrip() for line in lines)


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else spell_duration(seconds)


#: Colour and label of each curve.
_CURVES: Final = {
    "sent": ("#2a7f4f", "successful calls"),
    "wasted": ("#c0392b", "wasted: the provider was down"),
    "turned away": ("#e69f00", "turned away: too many a second"),
}


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a picture of the calls a second over time, with a panel for each strategy.

    Args:
        results: at least one.
        title: above the panels.
        path: its suffix says the format, such as ``.svg`` or ``.png``.

    Raises:
        ValueError: matplotlib is not installed, or does not know the format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "matplotlib is not installed: pip install 'celery-sqs-backoff[plot]'"
        ) from None
    figure = Figure(figsize=(9, 0.8 + 2.4 * len(results)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(results), 1, squeeze=False, sharex=True, sharey=True)
    for axes, result in zip(panels[:, 0], results, strict=True):
        drained = "not" if result.drain is None else spell_duration(result.drain)
        axes.set_title(
            f"{result.strategy}: {result.wasted:,} wasted, {result.turned_away:,} turned away,"
            f" drained: {drained}, {sum(result.dead.values()):,} dead letters",
            loc="left",
            fontsize=9,
        )
        axes.set_ylabel("calls a second")
        for name, (colour, label) in _CURVES.items():
            minutes = [at / 60 for at, _ in result.curves[name]]
            rates = [rate for _, rate in result.curves[name]]
            axes.plot(minutes, rates, color=colour, linewidth=1, label=label)
    panels[-1, 0].set_xlabel("minutes")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=120)
