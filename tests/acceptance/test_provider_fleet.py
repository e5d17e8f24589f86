"""Providers of several workers, and of several tenants."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually, free_port
from tests.support.record import note
from tests.support.redis_database import redis_url
from tests.support.workers import Worker

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 40
STORE = redis_url()

#: A call to a provider that hangs for a while, and a pause between two probes that is shorter than
#: that: workers that did not share the probe would probe at the same time.
HANGING_SECONDS = 1.0
intervals: dict[str, Any] = {"probe_interval": 0.5, "longest_probe_interval": 0.5}


class Down(Exception):
    """The provider does not answer."""


options: dict[str, Any] = {
    "base": SQSBackoffTask,
    "bind": True,
    "retry_on": Down,
    "backoff": FullJitter(base=1, cap=60),
}


@app.task(name="fleet.mail", provider=Provider("mail", shared=True, **intervals), **options)
def send(self: Any, number: int, down: str, hanging: str) -> None:
    is_down, began = Path(down).exists(), time.monotonic()
    if is_down and Path(hanging).exists():
        time.sleep(HANGING_SECONDS)
    note(task=self.name, number=number, failed=is_down, began=began, ended=time.monotonic())
    if is_down:
        raise Down


by_account = Provider("parcels", key="{account}", **intervals)


@app.task(name="fleet.parcel", provider=by_account, **options)
def book(self: Any, account: str, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, account=account, number=number, failed=is_down)
    if is_down:
        raise Down


@app.task(name="fleet.other", base=SQSBackoffTask)
def other() -> None:
    """Makes the queue one of several tasks: while a provider is down all is received."""


def down(worker: Worker) -> str:
    """The line by which a worker says that the provider is down; empty: it has not."""
    return next((line for line in worker.log().splitlines() if "provider_down" in line), "")


def probes_of(*workers: Worker) -> int:
    return sum(worker.log().count("provider_probing") for worker in workers)


class Mails:
    """Mails to a provider that is down, until it is told otherwise."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage = stage
        self.down, self.hanging = directory / "down", directory / "hanging"
        self.down.touch()

    def queue(self) -> None:
        for number in range(MAILS):
            self.stage.send("fleet.mail", number, str(self.down), str(self.hanging))

    def runs(self) -> list[dict[str, Any]]:
        return self.stage.runs("fleet.mail")

    def each_is_sent_once(self) -> bool:
        sent = [run["number"] for run in self.runs() if not run["failed"]]
        return sorted(sent) == list(range(MAILS))


@pytest.mark.redis
def test_two_workers_that_share_a_providers_health_probe_one_at_a_time(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    settings = {"store": STORE, "namespace": uuid4().hex, "secret": "x"}
    stage = make_stage(conf={"sqs_backoff": settings})
    mails = Mails(stage, tmp_path)
    with stage.worker() as first, stage.worker() as second:
        mails.queue()  # now: a worker that is alone for a second would hide them all
        eventually(lambda: down(first) and down(second), timeout=20)
        # With two probes what was under way when the gates opened is over.
        before = probes_of(first, second)
        eventually(lambda: probes_of(first, second) >= before + 2, timeout=20)
        hanging_from = time.monotonic()
        mails.hanging.touch()

        def hanging() -> list[tuple[float, float]]:
            calls = [(run["began"], run["ended"]) for run in mails.runs() if run["failed"]]
            return sorted(call for call in calls if call[0] > hanging_from)

        eventually(lambda: len(hanging()) >= 3, timeout=45)
        mails.down.unlink()
        stage.wait_until_settled(timeout=40)
    assert all(ended <= began for (_, ended), (began, _) in pairwise(hanging())), hanging()
    assert mails.each_is_sent_once()
    assert "another worker has found out" in first.log() + second.log()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis that a test may end, and its URL."""
    port = free_port()
    options = ["--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
        try:
            client = redis.Redis(port=port)
            eventually(lambda: _answers(client), timeout=10)
            yield f"redis://127.0.0.1:{port}/0", process
        finally:
            process.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.redis
def test_without_the_store_each_worker_finds_out_by_itself(
    make_stage: Callable[..., Stage],
    tmp_path: Path,
    own_redis: tuple[str, subprocess.Popen[bytes]],
) -> None:
    store, process = own_redis
    settings = {"store": store, "namespace": uuid4().hex, "secret": "x"}
    stage = make_stage(conf={"sqs_backoff": settings})
    mails = Mails(stage, tmp_path)
    with stage.worker() as first, stage.worker() as second:
        process.kill()
        process.wait()
        mails.queue()
        for worker in (first, second):
            eventually(lambda worker=worker: "found out here" in down(worker), timeout=20)
            eventually(lambda worker=worker: "health_store_away" in worker.log(), timeout=20)
        # Whoever receives the messages: one of the two may get them all.
        eventually(lambda: probes_of(first, second), timeout=20)
        mails.down.unlink()
        stage.wait_until_settled(timeout=40)
    assert mails.each_is_sent_once()


def test_a_tenant_that_is_down_leaves_the_others_alone(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make_stage()
    down_for = {account: tmp_path / account for account in ("a", "b", "c")}
    down_for["a"].touch()
    for number in range(20):
        for account, flag in down_for.items():
            stage.send("fleet.parcel", account, number, str(flag))

    def booked(account: str) -> list[int]:
        runs = [run for run in stage.runs("fleet.parcel") if run["account"] == account]
        return sorted(run["number"] for run in runs if not run["failed"])

    with stage.worker() as worker:
        eventually(lambda: "provider_down: parcels[" in worker.log(), timeout=20)
        eventually(lambda: booked("b") == booked("c") == list(range(20)), timeout=20)
        calls = [run for run in stage.runs("fleet.parcel") if run["account"] == "a"]
        assert len(calls) <= 6 + 8 + probes_of(worker), "threshold, prefetched, probes"
        assert booked("a") == []
        down_for["a"].unlink()
        stage.wait_until_settled(timeout=40)
    assert booked("a") == list(range(20)), "each once"
    assert worker.log().count("provider_down") == 1
