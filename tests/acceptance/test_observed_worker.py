"""A worker that is watched: its heartbeat, and its metrics."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import Retryable, Schedule, SQSBackoffTask
from celery_sqs_backoff.observe.health import MAX_AGE_SECONDS, diagnosis
from tests.support.fault_proxy import FaultProxy, unavailable
from tests.support.processes import eventually, free_port
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


@app.task(base=SQSBackoffTask, bind=True, name="observed.flaky", backoff=Schedule([1]))
def flaky(self: Any, failures: int) -> None:
    note(task="observed.flaky")
    if self.request.retries < failures:
        raise Retryable("down")


@app.task(base=SQSBackoffTask, name="observed.broken")
def broken() -> None:
    raise ValueError("no")


@app.task(base=SQSBackoffTask, name="observed.later", backoff=Schedule([600]), retry_for=3_600)
def later() -> None:
    note(task="observed.later")
    raise Retryable("down")


@app.task(base=SQSBackoffTask, name="observed.long")
def long(seconds: float) -> None:
    note(task="observed.long")
    time.sleep(seconds)


@app.task(name="observed.uncovered")
def uncovered(seconds: float) -> None:
    note(task="observed.uncovered")
    time.sleep(seconds)


@pytest.fixture
def heartbeat(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


def sick(heartbeat: Path) -> str | None:
    return diagnosis(heartbeat, now=time.time())


def test_a_stopped_worker_is_unhealthy_and_one_whose_sqs_is_down_is_not(
    make_stage: Callable[..., Stage], proxy: FaultProxy, heartbeat: Path
) -> None:
    stage = make_stage(conf={"sqs_backoff": {"heartbeat": str(heartbeat)}})
    with stage.worker() as worker:
        eventually(lambda: heartbeat.exists() and sick(heartbeat) is None)
        proxy.inject(unavailable())
        stage.send("observed.flaky", 0)
        with pytest.raises(AssertionError):  # not within that time: it stays healthy
            eventually(lambda: sick(heartbeat), timeout=7)
        proxy.heal()
        eventually(lambda: stage.runs("observed.flaky"), timeout=30)

        os.kill(worker.pid, signal.SIGSTOP)
        try:
            said = eventually(lambda: sick(heartbeat), timeout=MAX_AGE_SECONDS + 10)
            assert "the last heartbeat is" in said
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        eventually(lambda: sick(heartbeat) is None, timeout=15)
    eventually(lambda: not heartbeat.exists())


def scrape(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_runs_retries_and_dead_letters_are_counted_exactly(
    make_stage: Callable[..., Stage],
) -> None:
    port = free_port()
    stage = make_stage(conf={"sqs_backoff": {"prometheus_port": port}})
    queue = stage.queues[0].name
    with stage.worker(concurrency=2):
        for _ in range(10):
            stage.send("observed.flaky", 1)
        stage.send("observed.broken")
        stage.wait_until_settled()
        found = scrape(port)

        def runs(task: str, outcome: str) -> float:
            labels = f'outcome="{outcome}",queue="{queue}",task="{task}"'
            return found[f"sqs_backoff_runs_total{{{labels}}}"]

        assert runs("observed.flaky", "retryable") == 10
        assert runs("observed.flaky", "succeeded") == 10
        assert runs("observed.broken", "unknown") == 1
        labels = f'queue="{queue}",reason="not retryable",task="observed.broken"'
        assert found[f"sqs_backoff_dead_letters_total{{{labels}}}"] == 1
        assert found[f'sqs_backoff_messages_running{{queue="{queue}"}}'] == 0
        assert found[f'sqs_backoff_messages_waiting{{queue="{queue}"}}'] == 0
        health = urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5)
        assert health.read() == b"ok"


def test_running_is_what_runs_and_not_what_waits_for_a_process(
    make_stage: Callable[..., Stage],
) -> None:
    """With the base class or without; the worker holds more, by Celery's prefetch multiplier."""
    port = free_port()
    stage = make_stage(conf={"sqs_backoff": {"prometheus_port": port}})
    name = f'sqs_backoff_messages_running{{queue="{stage.queues[0].name}"}}'
    with stage.worker(concurrency=2) as worker:
        for task in ("long", "uncovered", "long", "uncovered"):
            for _ in range(2):
                stage.send(f"observed.{task}", 60)
        begun = ("observed.long", "observed.uncovered")
        eventually(lambda: sum(len(stage.runs(task)) for task in begun) == 2, timeout=30)
        # All of them, or all but a few that are not worth a call.
        eventually(lambda: stage.messages()[0] <= 4, timeout=30)
        assert scrape(port)[name] == 2
        worker.kill()


@pytest.mark.redis
def test_two_workers_of_one_name_are_both_in_the_status(
    make_stage: Callable[..., Stage], redis_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's warning of a node name that is taken needs fanout, which SQS has not."""
    own = {"store": redis_vhost, "namespace": "names", "secret": "s" * 32}
    stage = make_stage(conf={"sqs_backoff": own, "worker_prefetch_multiplier": 1})
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: stage.app)

    def running() -> int | None:
        result = CliRunner().invoke(celery, ["-A", "shop", "sqs-status", "--json"])
        found: int | None = json.loads(result.stdout)["queues"][0]["running"]
        return found

    same = {"concurrency": 1, "options": ("--hostname", "celery@shop")}
    with stage.worker(**same) as one, stage.worker(**same) as other:
        stage.send("observed.long", 60)
        stage.send("observed.long", 60)
        eventually(lambda: len(stage.runs("observed.long")) == 2, timeout=30)
        eventually(lambda: running() == 2, timeout=40, interval=0.5, message=lambda: str(running()))
        one.kill()
        other.kill()


@pytest.mark.redis
def test_status_tells_running_from_waiting_by_what_workers_write(
    make_stage: Callable[..., Stage], redis_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {"sqs_backoff": {"store": redis_vhost, "namespace": "status", "secret": "s" * 32}}
    stage = make_stage(conf=conf)
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: stage.app)

    def status() -> dict[str, Any]:
        result = CliRunner().invoke(celery, ["-A", "shop", "sqs-status", "--json"])
        assert result.exit_code == 0, result.output
        assert set(json.loads(result.stdout)) == {"queues", "providers"}
        [queue] = json.loads(result.stdout)["queues"]
        found: dict[str, Any] = queue
        return found

    for task, arguments in (("later", ()), ("later", ()), ("broken", ()), ("long", (60,))):
        stage.send(f"observed.{task}", *arguments)
    assert status()["waiting"] is not None, "nothing is in flight"
    with stage.worker(concurrency=1) as worker:
        eventually(lambda: stage.runs("observed.long"), timeout=30)
        assert status()["oldest_seconds"] is None or status()["oldest_seconds"] < 60
        found = eventually(
            lambda: (now := status())["running"] == 1 and now,
            timeout=40,
            interval=0.5,
            message=lambda: str(status()),
        )
        assert found["waiting"] == 2
        assert found["dead_letters"] == 1
        assert 0 < found["oldest_seconds"] < 120
        shown = CliRunner().invoke(celery, ["-A", "shop", "sqs-status"]).stdout
        assert "next: 2 messages give up within 2 hours, the first in" in shown
        assert "given up by the workers since they started: 1 not retryable" in shown
        worker.kill()
