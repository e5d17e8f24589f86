"""The tables that the demo shows in the terminal while it runs and at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .scene import Plan, Result, Snapshot

COLUMN_WIDTH = 18
TITLES = {
    "autoretry": "autoretry_for",
    "full-jitter": "full jitter",
    "provider": "jitter + provider=",
}


class LiveView:
    """Draws a table from the latest snapshots, with one column per run."""

    def __init__(self, console: Console, plan: Plan, policies: Sequence[str]) -> None:
        self._plan = plan
        self._bars = " ▁▂▃▄▅▆▇█" if console.encoding.startswith("utf") else " .:-=+*%#"
        self._rates = {policy: deque([0.0], maxlen=COLUMN_WIDTH) for policy in policies}
        self._highest_rate = 1.0

    def table(self, snapshots: Mapping[str, Snapshot]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("backoff")
        for policy, snapshot in snapshots.items():
            table.add_column(TITLES[policy], width=COLUMN_WIDTH)
            self._rates[policy].append(snapshot.calls_per_second)
            self._highest_rate = max(self._highest_rate, snapshot.calls_per_second)
        now = list(snapshots.values())
        table.add_row("mail provider", *map(self._provider, now))
        table.add_row("waiting in backoff", *(f"{each.queue.hidden:,}" for each in now))
        table.add_row("ready on SQS", *(f"{each.queue.visible:,}" for each in now))
        table.add_row("in the DLQ", *(f"{each.queue.dead:,}" for each in now))
        table.add_row("attempts so far", *(f"{each.calls:,}" for each in now))
        table.add_row("attempts per second", *map(self._sparkline, snapshots))
        table.add_row("mails sent", *(f"{each.sent:,} of {self._plan.mails:,}" for each in now))
        table.add_row("", *(self._progress(each) for each in now))
        return table

    def _provider(self, snapshot: Snapshot) -> Text:
        if left := snapshot.seconds_of_outage_left:
            return Text(f"down for {ceil(left)} s more", "bold red")
        return Text(f"up, {self._plan.calls_per_second} calls/s", "bold green")

    def _sparkline(self, policy: str) -> str:
        levels = len(self._bars) - 1
        return "".join(
            self._bars[ceil(levels * rate / self._highest_rate)] for rate in self._rates[policy]
        )

    def _progress(self, snapshot: Snapshot) -> ProgressBar:
        return ProgressBar(total=self._plan.mails, completed=snapshot.sent, width=COLUMN_WIDTH)


def result_table(results: Sequence[Result]) -> Table:
    """Return a table with the figures of all runs, side by side."""
    table = Table(box=box.SIMPLE_HEAD, title="What came out", title_justify="left")
    table.add_column("backoff")
    for result in results:
        table.add_column(TITLES[result.policy], justify="right")
    rows = {
        "mails queued during the outage": [result.mails for result in results],
        "attempts at the provider": [len(result.calls) for result in results],
        "of those while it was down": [result.wasted for result in results],
        "mails lost, or not sent yet": [result.lost for result in results],
        "mails sent twice": [result.duplicates for result in results],
        "mails in the DLQ": [result.dead for result in results],
        "busiest second after the recovery (calls)": [
            result.peak_calls_per_second for result in results
        ],
        "calls turned away by its rate limit (429)": [result.throttled for result in results],
        "seconds from the recovery to the last mail": [
            round(result.seconds_to_last_mail) for result in results
        ],
        "the shortest possible": [round(result.shortest_seconds) for result in results],
    }
    must_be_zero = {"mails lost, or not sent yet", "mails sent twice", "mails in the DLQ"}
    for label, values in rows.items():
        cells = [Text(f"{value:,}") for value in values]
        if label in must_be_zero:
            for cell, value in zip(cells, values, strict=True):
                cell.stylize("bold red" if value else "bold green")
        table.add_row(label, *cells)
    return table
