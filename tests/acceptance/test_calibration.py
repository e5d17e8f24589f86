"""The simulator against the real thing: one scene, played by two workers and in virtual time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()

MAILS_PER_SECOND = 25
CALL_SECONDS = 0.05
PROCESSES = 2

#: The simulator knows no slow machine: what is real may take this much longer than its slowest
#: draw. Calls while the provider is down depend on time less: they are probes, and what was under
#: way when the gate closed.
DRAIN_FACTOR, DRAIN_SECONDS = 2.0, 10.0
DRAIN_LESS_SECONDS = 2.0
CALLS_FACTOR, CALLS_MORE = 1.5, 4


class Down(Exception):
    """The provider does not answer."""


@app.task(
    name="calibration.mail",
    base=SQSBackoffTask,
    bind=True,
    retry_on=Down,
    backoff=FullJitter(base=1, cap=60),
    provider=Provider("mail", probe_interval=1),
)
def send(self: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, number=number, failed=is_down)
    time.sleep(CALL_SECONDS)
    if is_down:
        raise Down


def simulated(outage_seconds: int, seed: int) -> tuple[int, float]:
    """Return how many calls are made while the provider is down, and the seconds to drain."""
    options = {
        "task": send.name,
        "outage": f"{outage_seconds}s",
        "messages": f"{MAILS_PER_SECOND}/s",
        "capacity": f"{PROCESSES * 2 / CALL_SECONDS:g}/s",
        "workers": 2,
        "processes": PROCESSES,
        "seed": seed,
        "call": f"{CALL_SECONDS:g}s",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(celery, ["-A", __name__, "sqs-simulate", "--json", *arguments])
    assert done.exit_code == 0, done.output
    results = {each["strategy"]: each for each in json.loads(done.stdout)["results"]}
    return results["provider"]["wasted"], results["provider"]["drain"]


@pytest.mark.parametrize(
    ("outage_seconds", "seeds"),
    [pytest.param(4, 3, id="4 s"), pytest.param(10, 20, id="10 s", marks=pytest.mark.long)],
)
def test_simulator(
    make_stage: Callable[..., Stage], tmp_path: Path, outage_seconds: int, seeds: int
) -> None:
    """Two workers make as many calls during an outage as the simulator says, and drain as fast.

    Calls: within 1.5 times what its seeds say, and 4 more or less. Seconds to drain: at most twice
    the longest and 10; at least half the shortest, less 2.
    """
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    mails = MAILS_PER_SECOND * outage_seconds
    running = {name: {"concurrency": PROCESSES, **KILLED} for name in ("first", "second")}
    with stage.workers(**running):
        began = time.monotonic()
        for number in range(mails):
            stage.send("calibration.mail", number, str(flag))
            time.sleep(max(0.0, began + number / MAILS_PER_SECOND - time.monotonic()))
        eventually(lambda: stage.runs("calibration.mail"), timeout=20)
        eventually(lambda: time.monotonic() > began + outage_seconds, timeout=60)
        flag.unlink()
        back_at = time.monotonic()
        eventually(
            lambda: sum(not run["failed"] for run in stage.runs("calibration.mail")) >= mails,
            timeout=60,
        )
        drained = time.monotonic() - back_at
    calls = sum(run["failed"] for run in stage.runs("calibration.mail"))
    draws = [simulated(outage_seconds, seed) for seed in range(seeds)]
    wasted, drains = [calls for calls, _ in draws], [seconds for _, seconds in draws]
    figures = f"{calls} calls, simulated {wasted}; {drained:.1f} s to drain, simulated {drains}"
    print(figures)  # noqa: T201
    assert min(wasted) / CALLS_FACTOR - CALLS_MORE <= calls, figures
    assert calls <= CALLS_FACTOR * max(wasted) + CALLS_MORE, figures
    assert min(drains) / DRAIN_FACTOR - DRAIN_LESS_SECONDS <= drained, figures
    assert drained <= DRAIN_FACTOR * max(drains) + DRAIN_SECONDS, figures
