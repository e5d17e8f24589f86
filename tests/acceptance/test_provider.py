"""Workers rarely call a provider that is down, catch up soon afterwards, and keep to its rate."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note
from tests.support.redis_database import redis_url
from tests.support.workers import Worker

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()

MAILS = 40
PROBE: dict[str, Any] = {"probe_interval": 1}


class Down(Exception):
    """The provider does not answer."""


def task(name: str, **options: Any) -> Any:
    return app.task(
        name=name,
        base=SQSBackoffTask,
        bind=True,
        **{"retry_on": Down, "backoff": FullJitter(base=1, cap=60)} | options,
    )


def call(task: Any, number: int, flag: str) -> None:
    """Call the provider, which is down as long as the file ``flag`` exists."""
    is_down = Path(flag).exists()
    note(task=task.name, number=number, failed=is_down)
    if is_down:
        raise Down


mail = Provider("mail", **PROBE)
task("mail", provider=mail)(call)
task("limited", provider=mail, rate_limit="4/s")(call)
task("other")(call)


@task("tenant", provider=Provider("parcels", key="account", **PROBE))
def tenant(self: Any, account: str, number: int, flag: str) -> None:
    call(self, number, flag)


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


# One worker, while two providers are down


class Outage:
    """Run a worker while two providers are down: of mails, and of parcels.

    Some mails have an ETA, and some have a task with Celery's ``rate_limit``. The parcels belong to
    two tenants. The provider is down for tenant ``a`` only.
    """

    def __init__(self, stage: Stage, flag: Path, up: Path) -> None:
        self.stage = stage
        flag.touch()
        for number in range(MAILS):
            stage.send("mail", number, str(flag), queue="mixed")
        for number in range(MAILS // 2):
            stage.send("tenant", "a", number, str(flag), queue="tenants")
            stage.send("tenant", "b", MAILS + number, str(up), queue="tenants")
        with stage.worker(concurrency=2) as worker:
            for number in range(MAILS, 2 * MAILS):
                stage.send("mail", number, str(flag), queue="mixed", eta=in_seconds(3))
            for number in range(MAILS // 2):
                stage.send("limited", number, str(flag), queue="mixed")
            eventually(lambda: self.is_paused(worker, "mail"), timeout=60)
            eventually(lambda: self.is_paused(worker, "parcels"), timeout=60)
            began = time.monotonic()
            before = self.failures("mail") + self.failures("limited")
            eventually(
                lambda: self.failures("mail") + self.failures("limited") >= before + 3, timeout=60
            )
            stage.send("other", 0, str(up), queue="mixed")
            eventually(lambda: stage.runs("other"), timeout=60)
            eventually(lambda: stage.messages("mixed")[0] == 0, timeout=60)
            eventually(lambda: len(self.sent("tenant")) >= MAILS // 2, timeout=60)
            self.sent_while_down = self.sent("mail") + self.sent("limited")
            self.down = {
                name: worker.log().count(f"provider_paused: {name}") for name in ("mail", "parcels")
            }
            # The pause between two probes is random, but never below 3/4 of probe_interval (1 s).
            self.most_probes = (time.monotonic() - began) / 0.75 + 1
            self.failed = {
                "mail": self.failures("mail") + self.failures("limited"),
                "parcels": self.failures("tenant"),
            }
            flag.unlink()
            began = time.monotonic()
            stage.wait_until_settled(timeout=60)
            self.drained_in = time.monotonic() - began

    @staticmethod
    def is_paused(worker: Worker, name: str) -> bool:
        return f"provider_paused: {name}" in worker.log()

    def failures(self, task: str) -> int:
        return sum(run["failed"] for run in self.stage.runs(task))

    def sent(self, task: str) -> list[int]:
        return sorted(run["number"] for run in self.stage.runs(task) if not run["failed"])


@pytest.fixture(scope="module")
def outage(make_scene, tmp_path_factory):
    directory = tmp_path_factory.mktemp("flags")
    stage = make_scene(queues={"mixed": {}, "tenants": {}})
    return Outage(stage, directory / "down", directory / "up")


@pytest.mark.parametrize("provider", ["mail", "parcels"])
def test_few_calls(outage, provider):
    """Soon after the start of an outage, a worker calls the provider only with probes.

    Until then, at most 14 calls fail. After six of them, the worker pauses. The other eight were
    already running or waiting in the pool. Messages with an ETA or a rate limit wait inside
    Celery, and the worker pauses them as well.
    """
    assert outage.down[provider] == 1
    assert outage.failed[provider] <= 6 + 8 + outage.most_probes


def test_others_run(outage):
    """While a provider is down, tasks without it and tasks of its other tenants run."""
    assert outage.stage.runs("other")
    assert [number for number in outage.sent("tenant") if number >= MAILS]
    assert outage.sent_while_down == []


def test_recovery(outage):
    """Soon after an outage every task has succeeded once, although messages were hidden longer."""
    assert outage.sent("mail") == list(range(2 * MAILS))
    assert outage.sent("limited") == list(range(MAILS // 2))
    assert outage.sent("tenant") == [*range(MAILS // 2), *range(MAILS, MAILS + MAILS // 2)]
    assert all(outage.stage.dead_letters(queue) == [] for queue in outage.stage.queues)
    assert outage.drained_in < 45


# Calls per second


RATE = 20
STORE = redis_url()


@task("rated", provider=Provider("rated", rate=RATE))
def rated(self: Any, number: int) -> None:
    note(task=self.name, number=number, at=time.time())


@task("seldom", provider=Provider("seldom", rate=5))
def seldom(self: Any, queue: str, number: int) -> None:
    note(task=self.name, queue=queue, number=number)


@task("filling")
def filling(self: Any, queue: str) -> None:
    note(task=self.name, queue=queue)
    time.sleep(0.25)


class Stalls:
    """Measure the longest time by which this machine delays a thread that only sleeps."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(0.01):
            now = time.monotonic()
            self.longest = max(self.longest, now - before - 0.01)
            before = now


def busiest_second(at: list[float]) -> int:
    busiest, first = 0, 0
    for last, now in enumerate(at):
        while at[first] <= now - 1:
            first += 1
        busiest = max(busiest, last - first + 1)
    return busiest


@pytest.fixture
def agreed(make_stage):
    settings = {"store": STORE, "namespace": uuid4().hex, "secret": "x"}
    return make_stage(conf={"sqs_backoff": settings})


@pytest.mark.redis
@pytest.mark.parametrize(
    ("workers", "seconds"),
    [
        pytest.param(2, 6, id="2 workers"),
        pytest.param(3, 20, id="3 workers", marks=pytest.mark.long),
    ],
)
def test_agreed_rate(agreed, workers, seconds):
    """Workers together make at most 105 % of the agreed rate in any second, and use 90 % of it.

    Half of the messages become due at the same moment, as the mails of a newsletter do. A busy
    machine starts calls late. So the test allows for the longest stall that it has measured.
    """
    messages = RATE * seconds
    for number in range(messages // 2):
        agreed.send("rated", number)
    running = {f"worker-{n}": {"concurrency": 2, **KILLED} for n in range(workers)}
    with Stalls() as stalls, agreed.workers(**running):
        eta = in_seconds(2)
        for number in range(messages // 2, messages):
            agreed.send("rated", number, eta=eta)
        eventually(lambda: len(agreed.runs("rated")) == messages, timeout=60 * seconds)
    assert sorted(run["number"] for run in agreed.runs("rated")) == list(range(messages))
    at = sorted(run["at"] for run in agreed.runs("rated"))
    busiest = busiest_second(at)
    # Leave out the start, when not all workers work, and the end, when few messages are left.
    at = at[messages // 5 : -RATE]
    used = (len(at) - 1) / (at[-1] - at[0]) / RATE
    gap = max(later - earlier for earlier, later in pairwise(at))
    figures = {"busiest": busiest, "used": used, "gap": gap, "stall": stalls.longest}
    print(figures)  # noqa: T201
    # A call that a stall delays falls into the next second. This can happen in each worker.
    assert busiest <= 1.05 * RATE + 1 + 4 * RATE * stalls.longest, figures
    assert used >= (0.9 if stalls.longest < 0.05 else 0.6), figures


@pytest.fixture(scope="module")
def filled(make_scene):
    """Run one worker per pool. Each has 8 tasks with an agreed rate, and 60 that fill its pool."""
    pools = ("prefork", "threads", "gevent", "solo")
    stage = make_scene(queues={pool: {} for pool in pools})
    options = {
        pool: {"pool": pool, "concurrency": 1, "queues": [stage[pool].name], **KILLED}
        for pool in pools
    }
    for pool in pools:
        for number in range(8):
            stage.send("seldom", pool, number, queue=pool)
        for _ in range(60):
            stage.send("filling", pool, queue=pool)
    with stage.workers(**options):
        eventually(lambda: len(stage.runs("seldom")) == 8 * len(pools), timeout=60)
    return stage


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_rate_in_a_full_pool(filled, pool):
    """Tasks with an agreed rate run in time although other tasks fill the pool."""
    runs = [entry["task"] for entry in filled.record.entries(queue=pool)]
    last = max(n for n, task in enumerate(runs) if task == "seldom")
    assert runs[:last].count("filling") < 50, "the tasks with a rate ran after all others"
