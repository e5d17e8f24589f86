"""``celery sqs-simulate``: simulate an outage with the app's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from celery_sqs_backoff.doctor.look import load_tasks
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.simulate.engine import STRATEGIES, simulate
from celery_sqs_backoff.simulate.results import Result, plot, render
from celery_sqs_backoff.simulate.scenario import Scenario
from celery_sqs_backoff.units import parse_duration, parse_rate, spell_duration

from .command import CommandFailed, app_of, command, loading_app
from .exit_codes import USAGE
from .options import FILE, option


@command(
    "sqs-simulate",
    codes={},
    examples="""
        celery -A proj sqs-simulate --outage 2h --messages 1/s --capacity 20/s
        celery -A proj sqs-simulate --outage 2h --call 1s --plot outage.svg
        celery -A proj sqs-simulate --task mails.send_email --max-receive-count 10
    """,
)
@option("Scenario", "--outage DURATION", default="1h", help="How long the provider is down.")
@option("Scenario", "--messages RATE", default="1/s", help="New messages in the outage.")
@option(
    "Scenario",
    "--capacity RATE",
    default="20/s",
    help="Calls that the provider accepts; it refuses further calls.",
)
@option("Scenario", "--call DURATION", default="0.2s", help="Duration of a call to the provider.")
@option("Scenario", "--workers N", type=click.IntRange(1), default=10, help="How many workers.")
@option(
    "Scenario", "--processes N", type=click.IntRange(1), default=4, help="Processes per worker."
)
@option("Scenario", "--task NAME", help="Use the options of this task. [default: app-wide]")
@option("Scenario", "--seed N", type=int, default=0, help="Seed of the random numbers.")
@option(
    "Scenario",
    "--max-receive-count N",
    type=click.IntRange(1),
    help="Receives after which the queue moves a message. [default: no limit]",
)
@option("Output", "--json", "as_json", help="JSON on stdout.")
@option(
    "Output",
    *("--plot PATH", "picture"),
    type=FILE,
    help="Write a picture, such as outage.svg. Needs matplotlib.",
)
def sqs_simulate(
    ctx: click.Context,
    task: str | None,
    seed: int,
    as_json: bool,
    picture: Path | None,
    **options: Any,
) -> None:
    """Simulate an outage of the provider with the app's own options, in virtual time.

    The command compares two strategies: your delay policy alone (full-jitter), and your delay
    policy with a provider. It sends no message and does not ask SQS.
    """
    app = app_of(ctx)
    try:
        found = _options(app, task)
        scenario = _scenario(app, found, options)
        results = _compare(scenario, seed=seed)
        shown = {"results": [result.as_dict() for result in results]}
        click.echo(json.dumps(shown) if as_json else render(results))
        if picture is not None:
            plot(results, f"an outage of {spell_duration(scenario.outage)}", picture)
    except (ValueError, OSError) as exc:
        if isinstance(exc, OSError) and exc.filename is None:
            raise  # without a filename, the error is of stdout and not of the picture
        raise CommandFailed(exc, USAGE) from exc


def _scenario(app: Any, found: Options, options: dict[str, Any]) -> Scenario:
    # These options have defaults, so the parsers do not return None. ``or 0.0`` is for mypy.
    outage, call_seconds = (
        parse_duration(options[name], f"--{name}") or 0.0 for name in ("outage", "call")
    )
    rate, capacity = (
        parse_rate(options[name], f"--{name}") or 0.0 for name in ("messages", "capacity")
    )
    if not call_seconds:
        raise ValueError(f"invalid --call {options['call']!r}: expected more than 0")
    return Scenario(
        outage=outage,
        rate=rate,
        capacity=capacity,
        call_seconds=call_seconds,
        workers=options["workers"],
        processes=options["processes"],
        prefetch=max(0, int(app.conf.worker_prefetch_multiplier) - 1),
        options=found,
        max_receive_count=options["max_receive_count"],
    )


def _options(app: Any, name: str | None) -> Options:
    if name is None:
        return Options.resolve(app_wide=app.conf.get("sqs_backoff", {}), own={})
    with loading_app():
        load_tasks(app)
    if name not in app.tasks:
        raise ValueError(f"--task: the app has no task {name!r}")
    found: Options | None = getattr(app.tasks[name], "backoff_options", None)
    if found is None:
        raise ValueError(f"--task: {name!r} is not based on SQSBackoffTask")
    return found


def _compare(scenario: Scenario, *, seed: int) -> list[Result]:
    results = []
    for name in STRATEGIES:
        click.echo(f"simulating {name} ...", err=True)
        results.append(simulate(scenario, name, seed=seed))
    return results
