"""The figures of a simulation, as a table and as a picture, to compare strategies."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..retry.decision import Reply
from ..units import spell_duration
from .scenario import Scenario

#: Largest number of points of a curve.
_MOST_POINTS: Final = 720

#: Name, colour and label of the curve of each reply.
_CURVES: Final = {
    Reply.ANSWERED: ("sent", "#2a7f4f", "successful calls"),
    Reply.FAILED: ("wasted", "#c0392b", "wasted: the provider was down"),
    Reply.REFUSED: ("turned away", "#e69f00", "turned away: too many a second"),
}


@dataclass
class Result:
    """The figures of one strategy in one scenario. Times are seconds from the scenario's start.

    Attributes:
        strategy: name of the strategy.
        scenario: the simulated scenario.
        messages: number of sent messages.
        calls: number of calls, by reply and by the second in which they began.
        dead: number of messages that were given up, by reason.
        receives: number of settled messages, by their number of receives.
        in_flight_peak: largest number of messages in flight. SQS allows 120,000.
        backlog: number of unsettled messages at the end of the outage.
        ended_at: when the last message was settled.
    """

    strategy: str
    scenario: Scenario
    messages: int = 0
    calls: dict[Reply, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    dead: Counter[str] = field(default_factory=Counter)
    receives: Counter[int] = field(default_factory=Counter)
    in_flight_peak: int = 0
    backlog: int = 0
    ended_at: float = 0.0

    def count_calls(self, reply: Reply) -> int:
        """Return the number of calls to the provider with this reply."""
        return self.calls[reply].total()

    @property
    def dead_letters(self) -> int:
        """Number of messages that were given up."""
        return self.dead.total()

    @property
    def drain(self) -> float:
        """Seconds from the end of the outage until the last message was settled."""
        return max(0.0, self.ended_at - self.scenario.outage)

    @property
    def shortest_drain(self) -> float:
        """Shortest possible time, in seconds, for the fleet to settle the backlog."""
        return self.backlog / self.scenario.throughput

    @property
    def drain_ratio(self) -> float | None:
        """``drain`` divided by ``shortest_drain``. ``None`` if ``shortest_drain`` is below 1 s."""
        return self.drain / self.shortest_drain if self.shortest_drain >= 1 else None

    def find_receives(self, share: float) -> int:
        """Return a quantile of the receives per message. ``share``: 0.5 = median, 1 = maximum."""
        counts = sorted(self.receives.elements())
        return counts[max(0, math.ceil(share * len(counts)) - 1)] if counts else 0

    def curve(self, reply: Reply) -> list[tuple[float, float]]:
        """Return the calls a second over time, as at most 720 points.

        A point is a time in seconds, and the mean calls a second from then until the next point.
        """
        seconds = math.ceil((self.ended_at + 1) / _MOST_POINTS)
        counts: Counter[int] = Counter()
        for second, number in self.calls[reply].items():
            counts[second // seconds] += number
        return [(at * seconds, counts[at] / seconds) for at in range(max(counts, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return the values that ``sqs-simulate --json`` prints."""
        return {
            "strategy": self.strategy,
            "messages": self.messages,
            "calls": sum(map(self.count_calls, Reply)),
            "wasted": self.count_calls(Reply.FAILED),
            "turned_away": self.count_calls(Reply.REFUSED),
            "dead": dict(self.dead),
            "backlog": self.backlog,
            "drain": self.drain,
            "shortest_drain": self.shortest_drain,
            "drain_ratio": self.drain_ratio,
            "receives_p50": self.find_receives(0.5),
            "receives_p99": self.find_receives(0.99),
            "receives_max": self.find_receives(1),
            "in_flight_peak": self.in_flight_peak,
            "curves": {name: self.curve(reply) for reply, (name, _, _) in _CURVES.items()},
        }


#: For each row of the table: the name of its value, its label, and the format of the value.
_ROWS: Final = (
    ("messages", "messages", "{:,}"),
    ("calls", "calls", "{:,}"),
    ("wasted", "  wasted: provider down", "{:,}"),
    ("turned_away", "  turned away: too many", "{:,}"),
    ("dead_letters", "dead letters", "{:,}"),
    ("drain", "seconds to drain", "{:,.0f}"),
    ("shortest_drain", "  shortest possible", "{:,.0f}"),
    ("drain_ratio", "  times that", "{:.2f}"),
    ("receives_p50", "receives, median", "{:,}"),
    ("receives_p99", "receives, 99 of 100", "{:,}"),
    ("receives_max", "receives, most", "{:,}"),
    ("in_flight_peak", "most in flight", "{:,}"),
)


def render(results: Sequence[Result]) -> str:
    """Return a table with a column for each strategy, and a line per reason for dead letters."""
    columns = [{**one.as_dict(), "dead_letters": one.dead_letters} for one in results]
    lines = [" " * 24 + "".join(f"{one.strategy:>14}" for one in results)]
    for name, label, form in _ROWS:
        cells = ["-" if one[name] is None else form.format(one[name]) for one in columns]
        lines.append(f"{label:<24}" + "".join(f"{cell:>14}" for cell in cells))
    for one in results:
        for reason, number in sorted(one.dead.items()):
            lines.append(f"{one.strategy}: {number:,} dead letters: {reason}")
    return "\n".join(lines)


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a picture of the calls a second over time, with a panel for each strategy.

    Args:
        results: one result for each panel, at least one.
        title: title above the panels.
        path: path of the file. Its suffix is the format, such as ``.svg`` or ``.png``.

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
        axes.set_title(
            f"{result.strategy}: {result.count_calls(Reply.FAILED):,} calls wasted, drained in"
            f" {spell_duration(result.drain)}, {result.dead_letters:,} dead letters",
            loc="left",
            fontsize=9,
        )
        axes.set_ylabel("calls a second")
        for reply, (_, colour, label) in _CURVES.items():
            points = result.curve(reply)
            minutes, rates = [at / 60 for at, _ in points], [rate for _, rate in points]
            axes.plot(minutes, rates, color=colour, linewidth=1, label=label)
    panels[-1, 0].set_xlabel("minutes")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=120)
