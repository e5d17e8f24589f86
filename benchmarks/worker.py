"""Compare our worker with stock Celery on SQS, in speed and in calls per execution.

The benchmark measures all mechanisms in turns, so that other load on the machine slows all of them.
Rates are medians over the rounds, with the range in brackets. After the tables it shows the CPU
time per task (``benchmarks.overhead``) and the event loop (``benchmarks.loop_lag``).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from . import loop_lag, overhead
from .measure import Bench, Run, Setup, bench

__all__ = ["main"]

LATENCY_MS = 10
PREFETCH_MULTIPLIERS = (4, 32)
FAILURES = 2
OUTPUT = Path("demo-output", "bench-worker.json")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    A faster setup gets more ``tasks``. So the start of the worker, and the second before a retry,
    are a small part of the measured time.
    """

    title: str
    scenario: str
    tasks: int
    failures: int = 0
    against: str = "stock"
    #: kombu pauses for this time whenever the prefetch window is full. Its default is a second.
    #: With 0, stock Celery is fastest.
    polling_interval_seconds: float = 0


ROWS = (
    Row(
        title="stock, polling_interval=1 (default)",
        scenario="stock",
        tasks=150,
        polling_interval_seconds=1,
    ),
    Row(title="stock, polling_interval=0", scenario="stock", tasks=200),
    Row(title="SQSBackoffTask", scenario="ours", tasks=4000),
    Row(title="stock on Redis", scenario="redis", tasks=4000),
    Row(
        title=f"stock, autoretry_for, {FAILURES} retries",
        scenario="stock-autoretry",
        tasks=300,
        failures=FAILURES,
        against="stock-autoretry",
    ),
    Row(
        title=f"kombu backoff_policy, {FAILURES} retries",
        scenario="kombu-backoff",
        tasks=300,
        failures=FAILURES,
        against="stock-autoretry",
    ),
    Row(
        title=f"SQSBackoffTask, {FAILURES} retries",
        scenario="ours-retry",
        tasks=2500,
        failures=FAILURES,
        against="stock-autoretry",
    ),
)

CALLS = {
    "receive": ("ReceiveMessage",),
    "delete": ("DeleteMessage",),
    "change": ("ChangeMessageVisibility",),
    "send": ("SendMessage",),
    "all": (),
}


@dataclass(frozen=True)
class Spread:
    """A median and its range."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), median(values), max(values))

    def show(self, form: str = ".0f") -> str:
        low, middle, high = (format(x, form) for x in (self.low, self.middle, self.high))
        return middle if self.low == self.high else f"{middle} ({low}..{high})"


def _measure(
    bench: Bench, *, rounds: int, divide: int, multiplier: int, console: Console
) -> dict[Row, list[Run]]:
    runs: dict[Row, list[Run]] = {row: [] for row in ROWS}
    for number in range(rounds):
        for row in ROWS:
            console.print(
                f"prefetch multiplier {multiplier}, round {number + 1}: {row.title}", style="dim"
            )
            setup = Setup(
                scenario=row.scenario,
                tasks=max(10, row.tasks // divide),
                failures=row.failures,
                prefetch_multiplier=multiplier,
                polling_interval_seconds=row.polling_interval_seconds,
            )
            runs[row].append(bench.run(setup))
    return runs


def _ratios(runs: dict[Row, list[Run]], row: Row) -> Spread:
    """Return the ratios of a row's rates to those of stock Celery in the same round."""
    [stock] = [r for r in runs if r.scenario == row.against and not r.polling_interval_seconds]
    return Spread.of([a.rate / b.rate for a, b in zip(runs[row], runs[stock], strict=True)])


def _table(multiplier: int, runs: dict[Row, list[Run]]) -> Table:
    default = ", Celery's default" if multiplier == 4 else ""
    table = Table(title=f"worker_prefetch_multiplier={multiplier}{default}", title_justify="left")
    table.add_column("")
    for heading in ("executions/s", "x stock", "settled/s", "main CPU", *CALLS):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, done in runs.items():
        ratio = "1" if row.scenario == row.against and not row.polling_interval_seconds else None
        calls = [median([r.calls_per_execution(*names) for r in done]) for names in CALLS.values()]
        table.add_row(
            row.title,
            Spread.of([run.rate for run in done]).show(),
            ratio or _ratios(runs, row).show(".2f"),
            f"{median([run.settled_rate for run in done]):.0f}",
            f"{median([run.main_cpu_seconds for run in done]) * 1000:.2f}",
            *(f"{c:.2f}" if c >= 0.005 else "-" for c in calls),
            end_section=row.scenario == "redis",
        )
    return table


def _report(measured: dict[int, dict[Row, list[Run]]]) -> dict[str, Any]:
    """Return the content of the JSON file, with the measurements of each round."""
    return {
        "latency_ms": LATENCY_MS,
        "pool": "prefork, 2 processes",
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("celery", "kombu", "boto3", "ministack")},
        "rows": [
            {
                "title": row.title,
                "scenario": row.scenario,
                "prefetch_multiplier": multiplier,
                "polling_interval_seconds": row.polling_interval_seconds,
                "failures_per_task": row.failures,
                "executions_per_second": asdict(Spread.of([run.rate for run in done])),
                "times_stock": asdict(_ratios(runs, row)),
                "main_cpu_seconds": median([run.main_cpu_seconds for run in done]),
                "calls_per_execution": {
                    name: median([run.calls_per_execution(*actions) for run in done])
                    for name, actions in CALLS.items()
                },
                "rounds": [
                    {
                        "executions": run.executions,
                        "seconds": run.seconds,
                        "settled_seconds": run.settled_seconds,
                        "calls": {action: asdict(c) for action, c in run.calls.items()},
                    }
                    for run in done
                ],
            }
            for multiplier, runs in measured.items()
            for row, done in runs.items()
        ],
    }


@click.command(help=__doc__)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="Only try whether it runs: one round with few tasks.")
def main(*, rounds: int, quick: bool) -> None:
    """Measure, print the tables, and write the JSON file."""
    divide = 1
    if quick:
        rounds, divide = 1, 50
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 130
    measured = {}
    with bench(latency_ms=LATENCY_MS) as server:
        for multiplier in PREFETCH_MULTIPLIERS:
            measured[multiplier] = _measure(
                server, rounds=rounds, divide=divide, multiplier=multiplier, console=progress
            )
    console.print(
        f"Empty tasks, acks_late, 2 prefork processes, {LATENCY_MS} ms added to each SQS call."
        f" Medians of {rounds} round(s), with the range. x stock is the ratio within a round. main"
        " CPU is CPU time of the worker's main process, in ms per execution. The columns from"
        " receive on are SQS calls per execution. On Redis, calls have no added latency. Unless a"
        " row says otherwise, polling_interval is 0, which is best for stock Celery. Retries come"
        " after 1 s, which is SQS's shortest delay."
    )
    for multiplier, runs in measured.items():
        console.print(_table(multiplier, runs))
    overhead.show(repetitions=3 if quick else 15)
    console.print()
    loop_lag.show(tasks=10 if quick else 30)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(_report(measured), indent=2) + "\n")
    console.print(f"\nAll figures of the tables: {OUTPUT}")


if __name__ == "__main__":
    main()
