"""``celery sqs-simulate``: what would an outage do to the app's options?"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.doctor.look import load_tasks, why_not_loaded
from celery_sqs_backoff.provider import Provider
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.forecast import Forecast, forecast
from celery_sqs_backoff.simulate.law import STRATEGIES
from celery_sqs_backoff.simulate.results import Result, plot, render, result_of
from celery_sqs_backoff.simulate.scenario import Scenario, ScenarioError
from celery_sqs_backoff.sqs import errors
from celery_sqs_backoff.sqs.find_queue import QueueFinder, connection_to_look, why_not
from celery_sqs_backoff.units import parse_duration, parse_rate, spell_duration

from .command import Command
from .options import option

DONE: Final = 0
#: Wrong options; 2 is click's own code for it.
USAGE: Final = 2
#: --live: SQS does not answer, or refuses.
UNREACHABLE: Final = 5

_EPILOG = """\b
Exit codes: 0 done, 2 wrong options, 5 SQS is unreachable.

\b
Examples:
  celery -A proj sqs-simulate --outage 2h --messages 1/s --capacity 20/s
  celery -A proj sqs-simulate --outage 2h --call 1s --plot outage.svg
  celery -A proj sqs-simulate --live mails --oldest 3h --task mails.send_email
"""


@click.command("sqs-simulate", cls=Command, epilog=_EPILOG)
@option(
    "Scenario",
    "--outage",
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="How long the provider is down.",
)
@option(
    "Scenario",
    "--messages",
    metavar="RATE",
    default="1/s",
    show_default=True,
    help="New messages while it is down.",
)
@option(
    "Scenario",
    "--capacity",
    metavar="RATE",
    default="20/s",
    show_default=True,
    help="Calls that the provider takes; it refuses more.",
)
@option(
    "Scenario",
    "--call",
    metavar="DURATION",
    default="0.2s",
    show_default=True,
    help="How long a call of the provider takes.",
)
@option("Scenario", "--workers", type=click.IntRange(1), default=10, show_default=True)
@option(
    "Scenario",
    "--processes",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Processes per worker.",
)
@option(
    "Scenario", "--task", metavar="NAME", help="Use the options of this task.  [default: app-wide]"
)
@option("Scenario", "--seed", type=int, default=0, show_default=True, help="Another draw.")
@option(
    "Question",
    "--live",
    metavar="QUEUE",
    help="Start from this queue's messages, and say when they give up if the outage goes on.",
)
@option("Question", "--oldest", metavar="DURATION", help="With --live: the oldest message's age.")
@option("Output", "--json", "as_json", is_flag=True, help="JSON on stdout.")
@option(
    "Output",
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture, such as outage.svg. Needs matplotlib.",
)
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
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
    app = ctx.obj.app
    try:
        found = _options(app, task)
        scenario = _scenario(found, options)
        if live is not None:
            strategy = "full-jitter" if found.provider is None else "provider"
            _live(app, scenario, live, oldest, strategy=strategy, seed=seed, as_json=as_json)
            return
        results = _compare(scenario, seed=seed)
        shown = {"results": [result.as_dict() for result in results]}
        click.echo(json.dumps(shown) if as_json else render(results))
        if picture is not None:
            plot(results, f"an outage of {spell_duration(scenario.outage)}", picture)
    except (ValueError, OSError) as exc:
        if isinstance(exc, OSError) and exc.filename is None:
            raise  # of stdout
        click.echo(f"Error: {exc}", err=True)
        sys.exit(USAGE)


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


def _compare(scenario: Scenario, *, seed: int) -> list[Result]:
    results = []
    for name, strategy in STRATEGIES.items():
        click.echo(f"simulating {name} ...", err=True)
        results.append(result_of(name, scenario, simulate(scenario, strategy, seed=seed)))
    return results


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
    count = json.loads(attributes.get("RedrivePolicy", "{}")).get("maxReceiveCount")
    found = forecast(
        scenario,
        attributes,
        max_receive_count=None if count is None else int(count),
        oldest=parse_duration(oldest, "--oldest") or 0.0,
        strategy=strategy,
        seed=seed,
    )
    if as_json:
        click.echo(json.dumps({"queue": queue, **asdict(found)}))
    else:
        _print_forecast(queue, found, now=time.time())


def _attributes(app: Any, queue: str) -> dict[str, str] | errors.Failure | str:
    """Return a queue's attributes, or the reason why they cannot be read."""
    try:
        with connection_to_look(app) as connection:
            found = QueueFinder(connection.default_channel, attempts=2).find(queue)
            return found if isinstance(found, errors.Failure) else found.attributes()
    except Exception as exc:  # noqa: BLE001  # kombu and botocore raise many types
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
