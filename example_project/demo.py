"""``make demo``: 2,000 mails survive an outage of their mail provider.

Three workers send the same mails at the same time: stock Celery with ``autoretry_for``, full
jitter, and full jitter with ``provider=``. Then some mails become dead letters on purpose, and a
redrive sends them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from signal import SIGKILL

from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console
from rich.live import Live

from .display import LiveView, result_table
from .processes import DemoError, Programs, end_on_signals
from .scene import Plan, Replay, Result, Scene
from .services import SQS, MailProvider

POLICIES = ("autoretry", "full-jitter", "provider")

#: The demo waits for stock Celery's run until this time after the start, unless our two runs take
#: longer.
PATIENCE_SECONDS = 85

#: The demo ends itself after this long, whatever happens.
DEADLINE_SECONDS = 240

EXIT_FAILED = 1  # a mail was lost, sent twice or given up, or the demo could not go on
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    plan = Plan(mails=options.mails, outage_seconds=5 if options.quick else 30)
    end_on_signals(deadline_seconds=DEADLINE_SECONDS)
    picture = options.output / "calls.png"
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        results, replay = run(plan, console, picture, logs=options.output)
        if options.json is not None:
            summary = {
                "picture": str(picture),
                "runs": [result.summary() for result in results],
                "replay": asdict(replay),
            }
            options.json.write_text(json.dumps(summary, indent=2) + "\n")
    except KeyboardInterrupt:
        console.print("Interrupted. All programs that the demo has started are stopped.")
        return EXIT_INTERRUPTED
    except (DemoError, OSError, BotoCoreError, ClientError) as exc:
        # For example, the demo may not write into the directory, or a service has ended.
        console.print(f"The demo failed: {exc}", style="red", markup=False)
        return EXIT_FAILED
    # The run of stock Celery may lose mails or send them twice.
    ours = [replay, *(result for result in results if result.policy != "autoretry")]
    if is_clean := all(one.is_clean for one in ours):
        console.print("With this package each mail was sent once.")
    else:
        logs = options.output
        console.print(f"With this package each mail should be sent once. The logs are in {logs}.")
    console.print(f"Calls over time:  {picture}", soft_wrap=True)
    console.print("Try it by hand:   example_project/README.md")
    return 0 if is_clean else EXIT_FAILED


def run(plan: Plan, console: Console, picture: Path, *, logs: Path) -> tuple[list[Result], Replay]:
    """Play the outage with all three workers, then the redrive, and show the figures."""
    console.print(
        f"{plan.mails:,} mails are queued on SQS while the mail provider is down. Three Celery"
        " workers try to send them: with Celery's autoretry_for, with full jitter, and with full"
        f" jitter and provider=. After {plan.outage_seconds:g} s the provider is back, but takes"
        f" only {plan.calls_per_second} calls per second.\n"
    )
    with (
        tempfile.TemporaryDirectory() as temporary,
        # The services can be killed, because they have no state. The workers end before them, and
        # still need SQS to settle their messages.
        Programs(logs, stop_with=SIGKILL) as services,
        Programs(logs) as workers,
    ):
        with console.status("Starting a local SQS, three mail providers and three workers"):
            scenes = _set_up(services, workers, plan, Path(temporary))
        view = LiveView(console, plan, POLICIES)
        with Live(console=console, auto_refresh=False) as live:
            began = time.monotonic()
            while not _are_over(scenes, time.monotonic() - began):
                snapshots = {scene.policy: scene.look() for scene in scenes}
                live.update(view.table(snapshots), refresh=True)
                services.check()
                workers.check()
                time.sleep(0.5)
        console.print()
        results = [scene.result() for scene in scenes]
        _report(results, plan, picture, console)
        replay = _replay(scenes[-1], workers, plan, console)
    return results, replay


def _replay(scene: Scene, programs: Programs, plan: Plan, console: Console) -> Replay:
    """Make dead letters with a revoked API key, repair the key, and redrive the dead letters."""

    def show(command: str, output: str) -> None:
        console.print(f"\n$ {command}", style="bold", markup=False)
        console.print(output, markup=False, highlight=False, soft_wrap=True)

    console.print(
        f"Now the provider refuses the API key, and {plan.refused_mails} more mails are queued."
        " A retry would not help, so each becomes a dead letter:"
    )
    show(*scene.make_dead_letters(programs, plan.refused_mails))
    console.print("The key is repaired, and the dead letters are put back:")
    replay, command, output = scene.redrive(programs)
    show(command, output)
    console.print(
        f"{replay.sent} of {replay.dead} mails are sent, {replay.duplicates} of them twice, and"
        f" {replay.left} dead letters are left.\n"
    )
    return replay


def _set_up(services: Programs, workers: Programs, plan: Plan, directory: Path) -> list[Scene]:
    database = directory / "db.sqlite3"
    migrate = services.start(
        "migrate", "example_project.manage", "migrate", env={"DATABASE": str(database)}
    )
    sqs = SQS(services, directory)
    scenes = [
        Scene(policy, plan, sqs, MailProvider(services, f"provider-{policy}"), database)
        for policy in POLICIES
    ]
    services.finish(migrate)
    for sender in [scene.queue_mails(services) for scene in scenes]:
        services.finish(sender)
    for scene in scenes:
        scene.start_worker(workers)
    return scenes


def _report(results: list[Result], plan: Plan, picture: Path, console: Console) -> None:
    from .picture import draw  # imported late, because the import of matplotlib takes a second

    draw(results, plan, picture)
    console.print(result_table(results))


def _are_over(scenes: list[Scene], seconds: float) -> bool:
    left = [scene.policy for scene in scenes if not scene.is_over]
    return not left or (left == ["autoretry"] and seconds > PATIENCE_SECONDS)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {count}")
    return count


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument("--mails", type=_count, default=2000, help="number of mails; default 2,000")
    parser.add_argument("--quick", action="store_true", help="an outage of 5 s instead of 30")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="directory for the picture and the programs' logs; default demo-output",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
