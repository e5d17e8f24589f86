"""What an operator can see of workers: their health, their metrics and ``sqs-status``."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.bin.celery import celery
from celery.signals import worker_ready
from click.testing import CliRunner

from celery_sqs_backoff import Provider, Retryable, Schedule, SQSBackoffTask
from tests.support.fault_proxy import unavailable
from tests.support.processes import eventually, free_port
from tests.support.record import note
from tests.support.redis_database import redis_url

from .stage import KILLED, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()


@app.task(base=SQSBackoffTask, bind=True, name="flaky", backoff=Schedule([1]))
def flaky(self: Any, failures: int) -> None:
    note(task="flaky")
    if self.request.retries < failures:
        raise Retryable("down")


@app.task(base=SQSBackoffTask, name="broken")
def broken() -> None:
    raise ValueError("no")


@app.task(base=SQSBackoffTask, name="later", backoff=Schedule([600]), retry_for=3_600)
def later() -> None:
    note(task="later")
    raise Retryable("down")


@app.task(base=SQSBackoffTask, name="rated", provider=Provider("mail", rate="20/s"))
def rated(queue: str) -> None:
    note(task="rated", queue=queue)


def wait_for(flag: str) -> None:
    note(task="long")
    deadline = time.monotonic() + 60
    while not Path(flag).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


app.task(base=SQSBackoffTask, name="long")(wait_for)
app.task(name="uncovered")(wait_for)


def health(heartbeat: Path, *options: str) -> tuple[int, str]:
    """Return the exit code of ``sqs-health``, and what it prints."""
    result = CliRunner().invoke(celery, ["sqs-health", "--file", str(heartbeat), *options])
    return result.exit_code, result.output


def is_healthy(heartbeat: Path) -> bool:
    return health(heartbeat)[0] == 0


def get(port: int, path: str) -> str:
    answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5)
    return str(answer.read().decode())


def scrape(port: int) -> dict[str, float]:
    lines = [line for line in get(port, "metrics").splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class Watched:
    """Run two workers of the same name, each on its own queue, and keep what an operator sees.

    ``sqs-status`` shows both. Metrics and health are those of the first.
    """

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        assert stage.proxy is not None
        self.stage = stage
        self._monkeypatch = monkeypatch
        directory = stage.record.path.parent
        heartbeat, flag = directory / "heartbeat", directory / "go on"
        port = free_port()
        own = stage.app.conf.sqs_backoff | {"heartbeat": str(heartbeat), "prometheus_port": port}
        same = ("--hostname", "celery@shop")
        options: dict[str, Any] = {
            "first": {
                "conf": {"sqs_backoff": own},
                "options": same,
                "queues": [stage["main"].name],
            },
            "second": {
                "concurrency": 1,
                "options": same,
                "queues": [stage["second"].name],
                **KILLED,
            },
        }
        for _ in range(10):
            stage.send("flaky", 1)
        stage.send("broken")
        self.status_before = self.status("second")
        with stage.workers(**options) as workers:
            stage.wait_until_settled("main")
            self.counted = scrape(port)
            self.healthz = get(port, "healthz")

            stage.send("later")
            stage.send("later")
            eventually(lambda: len(stage.runs("later")) == 2, timeout=60)
            stage.send("long", str(flag), queue="second")
            stage.send("long", str(flag))
            stage.send("uncovered", str(flag))
            eventually(lambda: len(stage.runs("long")) == 3, timeout=60)
            self.status_now = eventually(
                lambda: (
                    self.status("main")["running"] == 2
                    and self.status("second")["running"] == 1
                    and (self.status("main"), self.status("second"))
                ),
                timeout=40,
                interval=0.5,
                message=lambda: f"{self.status('main')}, {self.status('second')}",
            )
            self.shown = self._celery("sqs-status", "-Q", stage["main"].name)
            for task in ("long", "uncovered") * 2:
                stage.send(task, str(flag))
            # At most two messages then remain on the queue. The worker does not receive so few
            # while its processes are busy.
            eventually(lambda: stage.messages()[0] <= 2, timeout=30)
            self.held = scrape(port)

            stage.proxy.inject(unavailable())
            self.outage = []
            until = time.monotonic() + 6
            while time.monotonic() < until:
                self.outage.append(health(heartbeat))
                time.sleep(0.2)
            stage.proxy.heal()
            os.kill(workers["first"].pid, signal.SIGSTOP)
            try:
                self.stopped = eventually(
                    lambda: (said := health(heartbeat, "--max-age", "8"))[0] == 1 and said,
                    timeout=30,
                )
            finally:
                os.kill(workers["first"].pid, signal.SIGCONT)
            eventually(lambda: is_healthy(heartbeat), timeout=60)
            flag.touch()
            assert workers["first"].stop() == 0
        self.is_file_left = heartbeat.exists()

    def _celery(self, *arguments: str) -> str:
        with self._monkeypatch.context() as patch:
            patch.setattr("celery.bin.celery.find_app", lambda name: self.stage.app)
            result = CliRunner().invoke(celery, ["-A", "shop", *arguments])
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    def status(self, queue: str) -> dict[str, Any]:
        found = json.loads(self._celery("sqs-status", "--json", "-Q", self.stage[queue].name))
        assert set(found) == {"queues", "providers"}
        [status] = found["queues"]
        return dict(status)


@pytest.fixture(scope="module")
def watched(make_scene):
    own = {"store": redis_url(), "namespace": uuid4().hex, "secret": "s" * 32}
    stage = make_scene(queues={"main": {}, "second": {}}, conf={"sqs_backoff": own})
    return Watched(stage, pytest.MonkeyPatch())


def test_metrics(watched):
    """The metrics count runs, retries and dead letters exactly."""
    found, queue = watched.counted, watched.stage["main"].name

    def runs(task, outcome):
        return found[f'sqs_backoff_runs_total{{outcome="{outcome}",queue="{queue}",task="{task}"}}']

    assert runs("flaky", "retryable") == runs("flaky", "succeeded") == 10
    assert runs("broken", "unknown") == 1
    labels = f'queue="{queue}",reason="not retryable",task="broken"'
    assert found[f"sqs_backoff_dead_letters_total{{{labels}}}"] == 1
    assert found[f'sqs_backoff_messages_running{{queue="{queue}"}}'] == 0
    assert found[f'sqs_backoff_messages_waiting{{queue="{queue}"}}'] == 0
    assert watched.healthz == "ok"


def test_running(watched):
    """The metric of running messages counts tasks with and without our base class.

    It does not count messages that wait for a process of the pool.
    """
    name = f'sqs_backoff_messages_running{{queue="{watched.stage["main"].name}"}}'
    assert watched.held[name] == 2


def test_status(watched):
    """``sqs-status`` shows running and waiting messages apart, as the workers report them."""
    assert watched.status_before["waiting"] is not None, "nothing is in flight, so it is 0"
    main, _ = watched.status_now
    assert (main["running"], main["waiting"], main["dead_letters"]) == (2, 2, 1)
    assert 0 < main["oldest_seconds"] < 120
    assert re.search(r"the first waiting message gives up in (59|60)\b", watched.shown)
    assert "given up by the workers since they started: 1 not retryable" in watched.shown


def test_two_workers_of_one_name(watched):
    """``sqs-status`` counts both workers. Celery cannot warn of them, because SQS has no fanout."""
    main, second = watched.status_now
    assert (main["running"], second["running"]) == (2, 1)


def test_health(watched):
    """``sqs-health`` finds a suspended worker unhealthy, and one that cannot reach SQS healthy."""
    assert {code for code, _ in watched.outage} == {0}
    code, said = watched.stopped
    assert code == 1
    assert "the last heartbeat is" in said
    assert not watched.is_file_left, "a worker that ends removes its heartbeat file"


# Threads that die


_TRIGGER = "TEST_BREAK_THREADS"


@worker_ready.connect(weak=False)
def break_on_demand(**_: Any) -> None:
    """End threads of this worker when the test asks for it.

    The test writes a file with the text with which the names of these threads begin.
    """
    if path := os.environ.get(_TRIGGER):
        threading.Thread(target=_break_threads, args=(Path(path),), daemon=True).start()


def _break_threads(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)
    doomed = [t for t in threading.enumerate() if t.name.startswith(path.read_text())]
    while doomed := [thread for thread in doomed if thread.is_alive()]:
        for thread in doomed:  # repeat this, because a thread may catch the exception
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        note(task="break", threads=path.read_text())
        time.sleep(0.1)


#: How the names of a worker's threads begin. The poller receives messages, the keeper makes the
#: calls that settle them, and the pacer starts messages that wait for a provider's rate.
THREADS = {"poller": "sqs-poll-", "keeper": "sqs-keeper", "pacer": "sqs-pace"}


@pytest.fixture(scope="module")
def unhealthy(make_scene):
    """Run three workers, end another thread in each, and return what ``sqs-health`` then says."""
    own = {"store": redis_url(), "namespace": uuid4().hex, "secret": "s" * 32}
    stage = make_scene(queues={queue: {} for queue in THREADS}, conf={"sqs_backoff": own})
    directory = stage.record.path.parent
    heartbeats = {queue: directory / f"{queue}-heartbeat" for queue in THREADS}
    triggers = {queue: directory / f"{queue}-trigger" for queue in THREADS}
    options = {
        queue: {
            "concurrency": 1,
            "conf": {"sqs_backoff": own | {"heartbeat": str(heartbeats[queue])}},
            "env": {_TRIGGER: str(triggers[queue])},
            "queues": [stage[queue].name],
            **KILLED,
        }
        for queue in THREADS
    }
    found = {}
    with stage.workers(**options):
        for queue in THREADS:
            stage.send("rated", queue, queue=queue)
        eventually(lambda: len(stage.runs("rated")) == len(THREADS), timeout=30)
        eventually(lambda: all(map(is_healthy, heartbeats.values())), timeout=60)
        for queue, name in THREADS.items():
            triggers[queue].write_text(name)
        eventually(lambda: stage.record.entries(threads=THREADS["pacer"]), timeout=60)
        for queue in THREADS:
            stage.send("rated", queue, queue=queue)  # the threads wake up
        for queue, heartbeat in heartbeats.items():
            eventually(
                lambda heartbeat=heartbeat: not is_healthy(heartbeat), timeout=30, message=queue
            )
            found[queue] = health(heartbeat)
    return found


@pytest.mark.parametrize("thread", THREADS)
def test_dead_thread(unhealthy, thread):
    """``sqs-health`` finds a worker unhealthy at most 30 seconds after a thread of it has died."""
    code, said = unhealthy[thread]
    assert code == 1
    assert said.count("\n") == 1
