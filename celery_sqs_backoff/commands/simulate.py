"""``celery sqs-simulate``: what would an outage do, and which options survive it?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.doctor.look import load_tasks, why_not_loaded
from celery_sqs_backoff.provider import Provider
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.forecast import Forecast, forecast, scenario_of_queue
from celery_sqs_backoff.simulate.plot import plot
from celery_sqs_backoff.simulate.results import Result, result_of
from celery_sqs_backoff.simulate.scenario import (
    Arrivals,
    Fleet,
    Kind,
    Phase,
    Scenario,
    ScenarioError,
    Script,
    Task,
)
from celery_sqs_backoff.simulate.strategies import STRATEGIES
from celery_sqs_backoff.sqs import errors
from celery_sqs_backoff.sqs.find_queue import connection_to_look, find_queue, why_not
from celery_sqs_backoff.sqs.limits import MAX_IN_FLIGHT_MESSAGES
from celery_sqs_backoff.units import parse_duration, parse_rate, spell_duration

from .command import Command
from .options import option

__all__ = ["DONE", "UNREACHABLE", "USAGE", "sqs_simulate"]

DONE: Final = 0
#: Wrong options. (2 is click's own.)
USAGE: Final = 2
#: --live: SQS does not answer, or refuses.
UNREACHABLE: Final = 5

_EPILOG = """\b
Exit codes: 0 done, 2 wrong options, 5 SQS is unreachable.

\b
Examples:
  celery -A proj sqs-simulate --outage 2h --messages 1/s --capacity 20/s
  celery -A proj sqs-simulate --outage 2h --compare autoretry,full-jitter,gate,gate+recall
  celery -A proj sqs-simulate --outage 2h --plot outage.svg
  celery -A proj sqs-simulate --live mails --oldest 3h
"""


@click.command("sqs-simulate", cls=Command, epilog=_EPILOG)
@option("Scenario", "--outage", metavar="DURATION", help="The provider is down: 2h. Default 1h.")
@option(
    "Scenario", "--messages", metavar="RATE", help="New messages until it is over: 1/s. Default."
)
@option(
    "Scenario", "--capacity", metavar="RATE", help="Calls that the provider takes. Default 20/s."
)
@option("Scenario", "--workers", type=click.IntRange(1), help="Default 10.")
@option("Scenario", "--processes", type=click.IntRange(1), help="Of each worker. Default 4.")
@option(
    "Scenario", "--task", metavar="NAME", help="Take the options of this task, not the app-wide."
)
@option("Scenario", "--seed", type=int, default=0, show_default=True, help="Another draw.")
@option(
    "Question",
    "--compare",
    metavar="NAMES",
    default="full-jitter,gate+recall",
    show_default=True,
    help=f"Side by side: {', '.join(STRATEGIES)}.",
)
@option(
    "Question",
    "--live",
    metavar="QUEUE",
    help="Start from this queue's depth: when does the first message give up if it goes on?",
)
@option("Question", "--oldest", metavar="DURATION", help="With --live: the oldest message's age.")
@option("Output", "--json", "as_json", is_flag=True, help="JSON on stdout.")
@option(
    "Output",
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture, .svg or .png (which needs matplotlib).",
)
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_simulate(
    ctx: click.Context,
    task: str | None,
    compare: str,
    live: str | None,
    oldest: str | None,
    seed: int,
    as_json: bool,
    picture: Path | None,
    **options: Any,
) -> None:
    """Simulate an outage of the provider with the app's own options, in virtual time.

    Nothing is sent. Only --live asks SQS, for a queue's attributes.
    """
    app = ctx.obj.app
    try:
        set_up = _scenario(app, task, options)
        if live is not None:
            strategy = _strategy(_options(app, task))
            _live(app, set_up, live, oldest, strategy=strategy, seed=seed, as_json=as_json)
        else:
            results = _compare(set_up, compare, seed=seed)
            _print(results, as_json=as_json)
            if picture is not None:
                _plot(results, set_up.name, picture)
    except ValueError as exc:  # a ScenarioError is one
        click.echo(f"Error: {exc}", err=True)
        sys.exit(USAGE)


def _scenario(app: Any, task: str | None, options: dict[str, Any]) -> Scenario:
    outage = parse_duration(options["outage"], "--outage")
    rate = parse_rate(options["messages"], "--messages")
    capacity = parse_rate(options["capacity"], "--capacity")
    outage = 3600.0 if outage is None else outage
    return Scenario(
        name=f"an outage of {spell_duration(outage)}",
        script=Script(
            capacity=20.0 if capacity is None else capacity,
            phases=(Phase(kind=Kind.OUTAGE, start=0.0, lasts=outage),),
        ),
        arrivals=Arrivals(rate=1.0 if rate is None else rate, lasts=outage),
        fleet=Fleet(workers=options["workers"] or 10, processes=options["processes"] or 4),
        task=_task(_options(app, task)),
    )


def _options(app: Any, name: str | None) -> Options:
    if name is None:
        return Options.resolve(app_wide=app.conf.get("sqs_backoff", {}), own={})
    try:
        load_tasks(app)
    except Exception as exc:  # of a task, or of its options
        raise ScenarioError(f"cannot load the app: {why_not_loaded(exc)}") from exc
    if name not in app.tasks:
        raise ScenarioError(f"--task: the app has no task {name!r}")
    found: Options | None = getattr(app.tasks[name], "backoff_options", None)
    if found is None:
        raise ScenarioError(f"--task: {name!r} is not based on SQSBackoffTask")
    return found


def _strategy(found: Options) -> str:
    """How messages wait under these options."""
    if found.provider is None:
        return "full-jitter"
    is_recalled = not isinstance(found.provider, Provider) or found.provider.recall is not False
    return "gate+recall" if is_recalled else "gate"


def _task(found: Options) -> Task:
    provider = found.provider if isinstance(found.provider, Provider) else Provider("default")
    return Task(
        thresholds=provider.thresholds,
        remember=provider.remember,
        backoff=found.backoff,
        retry_for=found.retry_for,
        max_retries=found.max_retries,
        crash_budget=found.crash_budget,
    )


def _compare(scenario: Scenario, names: str, *, seed: int) -> list[Result]:
    results = []
    for name in (part.strip() for part in names.split(",")):
        if name not in STRATEGIES:
            raise ScenarioError(f"--compare: {name!r}: expected names of {', '.join(STRATEGIES)}")
        click.echo(f"simulating {name} ...", err=True)
        results.append(result_of(name, scenario, simulate(scenario, STRATEGIES[name], seed=seed)))
    return results


def _print(results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"results": [result.as_dict() for result in results]}))
        return
    width = max(len(result.strategy) for result in results)
    rows: list[tuple[str, list[str]]] = [
        ("", [result.strategy for result in results]),
        ("messages", [f"{result.messages:,}" for result in results]),
        ("calls of the provider", [f"{result.calls:,}" for result in results]),
        ("  wasted: it was down", [f"{result.wasted:,}" for result in results]),
        ("  turned away: too many", [f"{result.turned_away:,}" for result in results]),
        ("dead letters", [f"{sum(result.dead.values()):,}" for result in results]),
        ("not settled in time", [f"{result.unsettled:,}" for result in results]),
        ("time to drain", [_duration(result.drain) for result in results]),
        ("  shortest possible", [_duration(result.drain_limit) for result in results]),
        ("  times that", [_times(result.drain_ratio) for result in results]),
        ("receives, median", [f"{result.receives_p50:,}" for result in results]),
        ("receives, 99 of 100", [f"{result.receives_p99:,}" for result in results]),
        ("receives, most", [f"{result.receives_max:,}" for result in results]),
        ("most in flight", [f"{result.in_flight_peak:,}" for result in results]),
        ("  of SQS's quota", [_share(result.in_flight_peak) for result in results]),
        ("requests to SQS, about", [f"{sum(r.requests.values()):,}" for r in results]),
        ("  price, about", [f"${result.usd:.2f}" for result in results]),
    ]
    for label, cells in rows:
        shown = "  ".join(f"{cell:>{max(width, 12)}}" for cell in cells)
        click.echo(f"{label:<24}{shown}".rstrip())
    for result in results:
        for reason, number in sorted(result.dead.items()):
            click.echo(f"{result.strategy}: {number:,} dead letters: {reason}")


def _plot(results: Sequence[Result], title: str, path: Path) -> None:
    try:
        plot(results, title, path)
    except OSError as exc:
        raise ScenarioError(f"--plot: {exc}") from exc


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else spell_duration(seconds)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(in_flight: int) -> str:
    return f"{in_flight / MAX_IN_FLIGHT_MESSAGES:.1%}"


def _live(
    app: Any,
    scenario: Scenario,
    queue: str,
    oldest: str | None,
    *,
    strategy: str,
    seed: int,
    as_json: bool,
) -> None:
    attributes = _attributes(app, queue)
    if not isinstance(attributes, dict):
        click.echo(f"Error: cannot read queue {queue}: {attributes}", err=True)
        sys.exit(UNREACHABLE)
    redrive_policy = json.loads(attributes.get("RedrivePolicy", "{}"))
    count = redrive_policy.get("maxReceiveCount")
    begun = scenario_of_queue(
        scenario,
        attributes,
        max_receive_count=None if count is None else int(count),
        oldest=parse_duration(oldest, "--oldest") or 0.0,
    )
    found = forecast(begun, strategy=strategy, seed=seed)
    if as_json:
        click.echo(json.dumps({"queue": queue, **found.as_dict()}))
    else:
        _print_forecast(queue, found, now=time.time())


def _attributes(app: Any, queue: str) -> dict[str, str] | errors.Failure | str:
    """Return a queue's attributes, or why they cannot be read."""
    try:
        with connection_to_look(app) as connection:
            place = find_queue(connection.default_channel, queue)
            return place if isinstance(place, errors.Failure) else place[1](place[0]).attributes()
    except Exception as exc:  # noqa: BLE001  # whatever keeps us from SQS
        return why_not(exc)


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
