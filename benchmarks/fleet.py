"""What does an outage of a provider cost a fleet, and how soon is everything sent afterwards?

Two workers of two processes, a local SQS, and the example project's mail provider, which is a real
HTTP server: it is down at first, and answers 429 beyond so many calls a second later. The figures
are those of the provider itself. The programs' logs stay in ``--logs``.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from signal import SIGKILL

import click

from example_project.processes import Programs, end_on_signals
from example_project.scene import Plan, Result, Scene
from example_project.services import SQS, MailProvider

__all__ = ["main", "play"]

#: Goals: calls while the provider is down; time to the last mail, as a multiple of the shortest.
MOST_WASTED = 60
MOST_TIMES_THE_SHORTEST = 1.3

_LOOK_SECONDS = 0.25


def play(plan: Plan, logs: Path, *, workers: int) -> Result:
    """Play one scene to its end, and return what came out of it."""
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as directory,
        Programs(logs, stop_with=SIGKILL) as services,  # they keep nothing
        Programs(logs) as fleet,
    ):
        database = Path(directory) / "db.sqlite3"
        env = {"DATABASE": str(database)}
        services.finish(services.start("migrate", "example_project.manage", "migrate", env=env))
        sqs, provider = SQS(services, Path(directory)), MailProvider(services, "provider")
        scene = Scene("provider", plan, sqs, provider, database)
        services.finish(scene.queue_mails(services))
        for number in range(workers):
            scene.start_worker(fleet, name=f"worker-{number}")
        while not scene.is_over:
            scene.look()
            services.check()
            fleet.check()
            time.sleep(_LOOK_SECONDS)
        return scene.result()


def report(result: Result) -> str:
    """Return the figures, a line each."""
    took, shortest = result.seconds_to_last_mail, result.shortest_seconds
    return "\n".join(
        [
            f"calls while down:            {result.wasted} (goal: at most {MOST_WASTED})",
            f"recovery to the last mail:   {took:.1f} s, {took / shortest:.2f} times the shortest"
            f" (goal: at most {MOST_TIMES_THE_SHORTEST})",
            f"turned away (429):           {result.throttled}",
            f"busiest second afterwards:   {result.peak_calls_per_second} calls",
            f"sent twice:                  {result.duplicates}",
            f"lost:                        {result.lost}",
            f"dead letters:                {result.dead}",
        ]
    )


@click.command(help=__doc__)
@click.option("--mails", default=1_500, show_default=True, type=click.IntRange(1))
@click.option("--outage", default=30.0, show_default=True, help="Seconds.")
@click.option("--rate", default=60, show_default=True, help="Calls a second that are taken.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--deadline", default=180, show_default=True, help="Seconds; then it has failed.")
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), help="Kept there.")
def main(
    *, mails: int, outage: float, rate: int, workers: int, deadline: int, logs: Path | None
) -> None:
    """Play and print."""
    end_on_signals(deadline_seconds=deadline)
    logs = logs or Path(tempfile.mkdtemp(prefix="fleet-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    click.echo(f"load average: {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    click.echo(report(play(Plan(mails, outage, rate), logs, workers=workers)))
    click.echo(f"logs: {logs}")


if __name__ == "__main__":
    main()
