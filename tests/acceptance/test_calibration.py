"""The simulator predicts how real workers behave in an outage of a mail server."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import FullJitter, Provider, Retryable, SQSBackoffTask
from tests.support.processes import eventually

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()

OUTAGE_SECONDS = 30
WORKERS = 2
SEEDS = 20

#: A figure of the real workers may be 20 % below the lowest simulated one, or above the highest.
TOLERANCE = 0.2


class MailServer:
    """An HTTP server that is down until ``recover`` gives it a capacity, in calls per second.

    It answers 503 while it is down, and 429 to calls above its capacity. As in the simulator, it
    takes at most one second's worth of calls at once.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []
        self.sent: set[int] = set()
        self._capacity, self._tokens, self._filled_at = 0, 0.0, 0.0
        self._lock = threading.Lock()
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the base class calls it by this name
                number = int(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(take(number))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> MailServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def recover(self, capacity: int) -> None:
        with self._lock:
            self._capacity, self._tokens, self._filled_at = capacity, capacity, time.time()

    def _take(self, number: int) -> int:
        with self._lock:
            now, status = time.time(), 503
            if self._capacity:
                filled = (now - self._filled_at) * self._capacity
                self._tokens = min(self._capacity, self._tokens + filled)
                self._filled_at, status = now, 429
                if self._tokens >= 1:
                    self._tokens, status = self._tokens - 1, 200
                    self.sent.add(number)
            self.calls.append((now, status))
            return status


@app.task(
    name="calibration.mail",
    base=SQSBackoffTask,
    backoff=FullJitter(base=1, cap=60),
    provider=Provider("mail", probe_interval=1),
)
def send(number: int, url: str, call_seconds: float) -> None:
    status = 200
    try:
        urllib.request.urlopen(url, data=str(number).encode(), timeout=10)
    except HTTPError as exc:
        status = exc.code
    time.sleep(call_seconds)
    if status != 200:
        raise Retryable(f"answered {status}", retry_after=0 if status == 429 else None)


@dataclass(frozen=True)
class Scene:
    """An outage of a provider. The workers can make more calls per second than it takes."""

    mails_per_second: int
    capacity: int
    call_seconds: float
    processes: int

    def simulate(self, seed: int) -> tuple[int, float]:
        """Simulate the outage, and return two figures.

        These are the number of calls while the provider is down, and the seconds from its return
        until all mails are sent.
        """
        options = {
            "task": send.name,
            "outage": f"{OUTAGE_SECONDS}s",
            "messages": f"{self.mails_per_second}/s",
            "capacity": f"{self.capacity}/s",
            "workers": WORKERS,
            "processes": self.processes,
            "call": f"{self.call_seconds:g}s",
            "seed": seed,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        done = CliRunner().invoke(celery, ["-A", __name__, "sqs-simulate", "--json", *arguments])
        assert done.exit_code == 0, done.output
        [_, found] = json.loads(done.stdout)["results"]
        return found["wasted"], found["drain"]

    def play(self, stage: Stage) -> tuple[int, float]:
        """Let real workers meet the outage, and return the same two figures."""
        mails = self.mails_per_second * OUTAGE_SECONDS
        options = {"concurrency": self.processes, **KILLED}
        workers = {f"worker-{number}": options for number in range(WORKERS)}
        with MailServer() as server, stage.workers(**workers):
            began = time.monotonic()
            for number in range(mails):
                stage.send(send.name, number, server.url, self.call_seconds)
                time.sleep(max(0.0, began + number / self.mails_per_second - time.monotonic()))
            time.sleep(max(0.0, began + OUTAGE_SECONDS - time.monotonic()))
            server.recover(self.capacity)
            back_at = time.time()
            eventually(lambda: len(server.sent) == mails, timeout=180, interval=0.2)
        last = max(at for at, status in server.calls if status == 200)
        wasted = sum(status == 503 for _, status in server.calls)
        return wasted, last + self.call_seconds - back_at


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(Scene(20, capacity=20, call_seconds=0.05, processes=2), id="calls of 0.05 s"),
        pytest.param(Scene(8, capacity=6, call_seconds=1.0, processes=4), id="calls of 1 s"),
    ],
)
def test_simulator(make_stage, scene):
    """Two figures of real workers are at most 20 % outside the range of 20 simulated outages.

    The figures are the calls while the provider is down, and the time to send all mails afterwards.
    """
    draws = [scene.simulate(seed) for seed in range(SEEDS)]
    real = scene.play(make_stage())
    columns = zip(("calls", "drain"), real, zip(*draws, strict=True), strict=True)
    for what, figure, simulated in columns:
        said = f"{what}: {figure:.1f}, simulated {min(simulated):.1f} to {max(simulated):.1f}"
        print(said)  # noqa: T201
        assert figure >= (1 - TOLERANCE) * min(simulated), said
        assert figure <= (1 + TOLERANCE) * max(simulated), said
