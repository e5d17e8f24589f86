"""Measure how long calls to SQS block the worker's event loop.

While the loop is blocked, the worker receives nothing, gives a free process no task, and ends no
task at its time limit. In this benchmark each call to SQS takes 300 ms, as on a bad day. A probe in
the worker measures how late the loop calls it.
"""

from __future__ import annotations

import click

from tests.support import loop_probe

from .measure import Setup, bench

__all__ = ["main", "show"]

LATENCY_MS = 300

SCENARIOS = {
    "stock": "stock, acks_late",
    "ours": "SQSBackoffTask",
    "ours-retry": "SQSBackoffTask, one retry",
}


def show(*, tasks: int = 30) -> None:
    """Measure, and print the longest blockage for each kind of task."""
    click.echo(
        f"Event loop with {LATENCY_MS} ms added to each SQS call (a blockage is"
        f" {loop_probe.THRESHOLD_SECONDS * 1000:.0f} ms or more):"
    )
    with bench(latency_ms=LATENCY_MS) as server:
        for scenario, title in SCENARIOS.items():
            run = server.run(
                Setup(
                    scenario=scenario,
                    tasks=tasks,
                    failures=int(scenario == "ours-retry"),
                    watch_loop=True,
                )
            )
            longest = f"{max(run.blockages) * 1000:.0f} ms" if run.blockages else "none"
            click.echo(
                f"  {title:<26} longest blockage: {longest:>6},"
                f" {sum(run.blockages):4.1f} s in {run.settled_seconds:4.1f} s"
            )


@click.command(help=__doc__)
@click.option(
    "--tasks", default=30, show_default=True, type=click.IntRange(10), help="Tasks of each kind."
)
def main(*, tasks: int) -> None:
    show(tasks=tasks)


if __name__ == "__main__":
    main()
