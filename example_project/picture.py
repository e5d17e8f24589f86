"""Draw the calls to the provider over time, with one panel per run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .scene import Plan, Result

#: The meaning and the colour of each status. Colour-blind readers can tell the colours apart.
STATUSES = {
    503: ("503, provider down", "#999999"),
    429: ("429, too many calls", "#d55e00"),
    200: ("200, mail sent", "#0072b2"),
}
TITLES = {
    "autoretry": "Celery's autoretry_for",
    "full-jitter": "Full jitter",
    "provider": "Full jitter and provider=",
}


def draw(results: Sequence[Result], plan: Plan, path: Path) -> None:
    """Save a PNG with the calls per second of each run. The outage is shaded."""
    figure, panels = plt.subplots(
        len(results), sharex=True, sharey=True, figsize=(11, 9), layout="constrained"
    )
    for panel, result in zip(panels, results, strict=True):
        _draw_run(panel, result, plan)
    panels[0].set_ylim(0, 1.25 * panels[0].get_ylim()[1])  # room for the labels
    panels[0].set_xlim(0, max(when for result in results for when, _ in result.calls) + 1)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        title="The provider answered",
    )
    panels[-1].set_xlabel("seconds since the first call")
    figure.suptitle(
        f"{plan.mails:,} mails and a provider that is down for {plan.outage_seconds:g} s",
        fontsize=14,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_run(panel: Axes, result: Result, plan: Plan) -> None:
    back_at = result.recovered_at
    panel.axvspan(0, back_at, color="#f0e442", alpha=0.25, lw=0)
    panel.axvline(back_at, color="#999999", lw=1)
    top = {"transform": panel.get_xaxis_transform(), "va": "top", "fontsize": 10}
    panel.text(back_at - 0.3, 0.97, "provider is down", ha="right", **top)
    panel.text(back_at + 0.3, 0.97, "provider is back", ha="left", **top)
    panel.axhline(plan.calls_per_second, color="black", lw=1, ls="--")
    panel.text(
        0.995,
        plan.calls_per_second + 2,
        f"it takes {plan.calls_per_second} calls per second",
        transform=panel.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=10,
    )
    # Each bar is one second wide. One bar begins when the provider is back.
    last = max(when for when, _ in result.calls)
    edges = [back_at + second for second in range(-ceil(back_at), ceil(last - back_at) + 1)]
    panel.hist(
        [[when for when, status in result.calls if status == each] for each in STATUSES],
        bins=edges,
        stacked=True,
        rwidth=0.9,
        color=[colour for _, colour in STATUSES.values()],
        label=[meaning for meaning, _ in STATUSES.values()],
    )
    panel.set_title(
        f"{TITLES[result.policy]}: {result.wasted:,} calls while it was down,"
        f" {result.throttled:,} turned away; {_end(result)}",
        loc="left",
        fontsize=11,
    )
    panel.set_ylabel("calls per second")
    panel.spines[["top", "right"]].set_visible(False)


def _end(result: Result) -> str:
    if result.lost:
        return f"{result.lost:,} mails not sent when the demo ended"
    return (
        f"last mail {result.seconds_to_last_mail:.0f} s after the recovery"
        f" (at best {result.shortest_seconds:.0f} s)"
    )
