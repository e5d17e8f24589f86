"""The simulator against the real thing: one scene, played by two workers and in virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.measures import Call
from celery_sqs_backoff.simulate.scenario import (
    Arrivals,
    Fleet,
    Kind,
    Phase,
    Scenario,
    Script,
    Task,
)
from celery_sqs_backoff.simulate.strategies import Recall
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 200
OUTAGE_SECONDS = 8.0
SENT_IN_SECONDS = 2.0  # about
CALL_SECONDS = 0.05
PROCESSES = 2
SEEDS = range(20)

#: The simulator knows no slow machine: what is real may take this much longer than its slowest
#: draw. Calls while the provider is down depend on time less: they are probes, and what was under
#: way when the gate closed.
DRAIN_FACTOR, DRAIN_SECONDS = 2.0, 10.0
DRAIN_LESS_SECONDS = 2.0
CALLS_FACTOR, CALLS_MORE = 1.5, 4

backoff = FullJitter(base=1, cap=60)
provider = Provider("mail", probe_interval=1, longest_probe_interval=4)


class Down(Exception):
    """The provider does not answer."""


@app.task(
    name="calibration.mail",
    base=SQSBackoffTask,
    bind=True,
    retry_on=Down,
    backoff=backoff,
    provider=provider,
)
def send(self: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, number=number, failed=is_down)
    time.sleep(CALL_SECONDS)
    if is_down:
        raise Down


def simulated() -> tuple[list[int], list[float]]:
    """Calls while the provider is down, and seconds to drain, one of each per seed."""
    outage = Phase(kind=Kind.OUTAGE, start=0.0, lasts=OUTAGE_SECONDS)
    scenario = Scenario(
        script=Script(
            capacity=None,
            call_seconds=CALL_SECONDS,
            failed_call_seconds=CALL_SECONDS,
            phases=(outage,),
        ),
        arrivals=Arrivals(rate=MAILS / SENT_IN_SECONDS, lasts=SENT_IN_SECONDS),
        fleet=Fleet(workers=2, processes=PROCESSES, prefetch=3),  # Celery's default: 4 in all
        task=Task(backoff=backoff, thresholds=provider.thresholds),
    )
    measures = [simulate(scenario, Recall, seed=seed) for seed in SEEDS]
    calls = [each.calls[Call.WASTED] for each in measures]
    return calls, [(each.drained_at or 0.0) - OUTAGE_SECONDS for each in measures]


def test_the_simulator_says_what_two_workers_do(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """Calls during the outage: within 1.5 times what 20 seeds of the simulator say, and 4 more or
    less. Seconds to drain: at most twice its longest and 10; at least half its shortest, less 2."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    with stage.worker(concurrency=PROCESSES), stage.worker(concurrency=PROCESSES):
        for number in range(MAILS):
            stage.send("calibration.mail", number, str(flag))
        eventually(lambda: stage.runs("calibration.mail"), timeout=20)
        time.sleep(OUTAGE_SECONDS)
        flag.unlink()
        back_at = time.monotonic()
        eventually(
            lambda: sum(not run["failed"] for run in stage.runs("calibration.mail")) >= MAILS,
            timeout=60,
        )
        drained = time.monotonic() - back_at
        stage.wait_until_settled(timeout=20)
    calls = sum(run["failed"] for run in stage.runs("calibration.mail"))
    calls_simulated, drains_simulated = simulated()
    shortest, longest = min(drains_simulated), max(drains_simulated)
    figures = (
        f"{calls} calls, simulated {min(calls_simulated)} to {max(calls_simulated)};"
        f" {drained:.1f} s to drain, simulated {shortest:.1f} to {longest:.1f}"
    )
    assert min(calls_simulated) / CALLS_FACTOR - CALLS_MORE <= calls, figures
    assert calls <= CALLS_FACTOR * max(calls_simulated) + CALLS_MORE, figures
    assert shortest / DRAIN_FACTOR - DRAIN_LESS_SECONDS <= drained, figures
    assert drained <= DRAIN_FACTOR * longest + DRAIN_SECONDS, figures
