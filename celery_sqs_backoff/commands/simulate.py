"""``celery sqs-simulate``: what would an outage do to the app's options?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from celery_sqs_backoff.doctor.look import load_tasks
from celery_sqs_backoff.provider import Provider
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.forecast import Forecast, forecast
from celery_sqs_backoff.simulate.law import STRATEGIES
from celery_sqs_backoff.simulate.results import Result, plot, render, result_of
from celery_sqs_backoff.simulate.scenario import Scenario, ScenarioError
from celery_sqs_backoff.sqs.errors import Failure
from celery_sqs_backoff.sqs.find_queue import QueueFinder, connection_to_look, why_not
from celery_sqs_backoff.units import parse_duration, parse_rate, spell_duration

from .command import Failed, app_of, command, failed_to_read, loading_app
from .exit_codes import UNREACHABLE, USAGE
from .options import FILE, option


@command(
    "sqs-simulate",
    codes={UNREACHABLE: None},
    examples="""
        celery -A proj sqs-simulate --outage 2h --messages 1/s --capacity 20/s
        celery -A proj sqs-simulate --outage 2h --call 1s --plot outage.svg
        celery -A proj sqs-simulate --live mails --oldest 3h --task mails.send_email
    """,
)
@option("Scenario", "--outage DURATION", default="1h", help="How long the provider is down.")
@option("Scenario", "--messages RATE", default="1/s", help="New messages while it is down.")
@option(
    "Scenario",
    "--capacity RATE",
    default="20/s",
    help="Calls that the provider takes; it refuses more.",
)
@option("Scenario", "--call DURATION", default="0.2s", help="How long a call to it takes.")
@option("Scenario", "--workers", type=click.IntRange(1), default=10)
@option("Scenario", "--processes", type=click.IntRange(1), default=4, help="Per worker.")
@option("Scenario", "--task NAME", help="Use the options of this task. [default: app-wide]")
@option("Scenario", "--seed", type=int, default=0, help="Another draw.")
@option(
    "Question",
    "--live QUEUE",
    help="Start from this queue's messages, and say when they give up if the outage goes on.",
)
@option("Question", "--oldest DURATION", help="With --live: the oldest message's age.")
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
    live: str | None,
    oldest: str | None,
    as_json: bool,
    picture: Path | None,
    **options: Any,
) -> None:
    """Simulate an outage of the provider with the app's own options, in virtual time.

    Two strategies stand side by side: your delay policy alone (full-jitter), and with a provider.
    Nothing is sent. Only --live asks SQS, for a queue's attributes.
    """
    app = app_of(ctx, needs_sqs=live is not None)
    try:
        found = _options(app, task)
        scenario = _scenario(found, options)
        if live is not None:
            strategy = "full-jitter" if found.provider is None else "provider"
            age = parse_duration(oldest, "--oldest") or 0.0
            forecasted = _forecast(app, scenario, live, age, strategy=strategy, seed=seed)
            if as_json:
                click.echo(json.dumps({"queue": live, **asdict(forecasted)}))
            else:
                _print_forecast(live, forecasted, now=time.time())
            return
        results = _compare(scenario, seed=seed)
        shown = {"results": [result.as_dict() for result in results]}
        click.echo(json.dumps(shown) if as_json else render(results))
        if picture is not None:
            plot(results, f"an outage of {spell_duration(scenario.outage)}", picture)
    except (ValueError, OSError) as exc:
        if isinstance(exc, OSError) and exc.filename is None:
            raise  # of stdout
        raise Failed(exc, USAGE) from exc


def _scenario(found: Options, options: dict[str, Any]) -> Scenario:
    call_seconds = parse_duration(options["call"], "--call")
    outage = parse_duration(options["outage"], "--outage")
    assert call_seconds is not None
    assert outage is not None
    provider = found.provider if isinstance(found.provider, Provider) else Provider("simulated")
    return Scenario(
        outage=outage,
        rate=parse_rate(options["messages"], "--messages") or 0.0,
        capacity=parse_rate(options["capacity"], "--capacity"),
        call_seconds=call_seconds,
        workers=options["workers"],
        processes=options["processes"],
        backoff=found.backoff,
        retry_for=found.retry_for,
        max_retries=found.max_retries,
        crash_budget=found.crash_budget,
        provider=provider,
    )


def _options(app: Any, name: str | None) -> Options:
    if name is None:
        return Options.resolve(app_wide=app.conf.get("sqs_backoff", {}), own={})
    with loading_app():
        load_tasks(app)
    if name not in app.tasks:
        raise ScenarioError(f"--task: the app has no task {name!r}")
    found: Options | None = getattr(app.tasks[name], "backoff_options", None)
    if found is None:
        raise ScenarioError(f"--task: {name!r} is not based on SQSBackoffTask")
    return found


def _compare(scenario: Scenario, *, seed: int) -> list[Result]:
    results = []
    for name, strategy in STRATEGIES.items():
        click.echo(f"simulating {name} ...", err=True)
        results.append(result_of(name, scenario, simulate(scenario, strategy, seed=seed)))
    return results


def _forecast(
    app: Any, scenario: Scenario, queue: str, oldest: float, *, strategy: str, seed: int
) -> Forecast:
    try:
        with connection_to_look(app) as connection:
            place = QueueFinder(connection.default_channel, attempts=2).find(queue)
            found = place if isinstance(place, Failure) else place.attributes()
    except Exception as exc:  # kombu and botocore raise many types
        raise failed_to_read(f"queue {queue}", why_not(exc)) from exc
    if isinstance(found, Failure):
        raise failed_to_read(f"queue {queue}", found)
    count = json.loads(found.get("RedrivePolicy", "{}")).get("maxReceiveCount")
    return forecast(
        scenario,
        found,
        max_receive_count=None if count is None else int(count),
        oldest=oldest,
        strategy=strategy,
        seed=seed,
    )


def _print_forecast(queue: str, found: Forecast, *, now: float) -> None:
    click.echo(f"{queue}: {found.messages:,} messages, ready, in flight or delayed")
    if not found.messages:
        return
    if found.first is None:
        click.echo(f"none gives up within {spell_duration(found.horizon)}")
        return
    click.echo(
        f"if the outage goes on, the first message gives up in {spell_duration(found.first)}"
        f" ({_clock(now + found.first)})"
    )
    for at, number in found.given_up:
        click.echo(f"  {number:,} by {_clock(now + at)}, in {spell_duration(at)}")
    for reason, number in sorted(found.reasons.items()):
        click.echo(f"  {number:,}: {reason}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
