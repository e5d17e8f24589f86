"""What does an outage of a provider cost a fleet, and how soon is everything sent afterwards?

Real workers, a local SQS, and a provider that is a real HTTP server in this process. It is down at
first. Later it takes so many calls in each second, and answers 429 to the others. All figures are
those of the provider.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import click
from celery import Celery

from tests.support.processes import free_port
from tests.support.queues import create_queue
from tests.support.servers import ministack, sqs_client
from tests.support.workers import Worker, worker

__all__ = ["SCENES", "main", "play"]

_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Scene:
    """An outage and a fleet.

    Attributes:
        mails: that wait when the outage begins.
        outage: seconds, from the first call on.
        rate: calls that the provider takes in each second; more are answered 429.
        workers, processes: the fleet; ``pool`` is Celery's.
        call_seconds: how long a call takes while the provider is up.
        down: what it answers while it is down: a status, ``trusted`` (503 with a Retry-After), or
            ``hang``: no answer.
        timeout: of a call.
        others: tasks of another provider a second, on the same workers, while the first is down.
        agreed: the task's agreed rate, over a store.
        patience: seconds after the outage, then the scene has failed.
        goal: the most that the scene may take.
    """

    mails: int = 400
    outage: float = 60.0
    rate: int = 10
    workers: int = 2
    processes: int = 30
    pool: str = "threads"
    call_seconds: float = 0.05
    down: str = "trusted"
    timeout: float = 30.0
    others: float = 0.0
    agreed: float | None = None
    patience: float = 150.0
    goal: str = ""


_FOUR = Scene(workers=4, processes=15, goal="at most 1.5 times in each of five runs")
_KINDS = Scene(goal="calls while down as for `trusted`")

SCENES = {
    "mails": Scene(
        mails=1_500,
        outage=30,
        rate=60,
        processes=2,
        pool="prefork",
        call_seconds=0.0,
        goal="at most 1.3 times, 10 % turned away, 60 calls while down",
    ),
    "slow": Scene(
        mails=240, outage=30, rate=12, processes=15, call_seconds=1.0, goal="at most 1.4 times"
    ),
    "four-half": replace(_FOUR, call_seconds=0.5),
    "four-three": replace(_FOUR, call_seconds=3.0),
    "trusted": _KINDS,
    "bare-503": replace(_KINDS, down="503"),
    "502": replace(_KINDS, down="502"),
    "timeouts": replace(_KINDS, down="hang", timeout=5.0),
    "hanging": Scene(
        down="hang",
        timeout=5.0,
        workers=1,
        processes=10,
        mails=200,
        rate=20,
        others=4.0,
        goal="tasks of another provider start within 1 s for half of them, 20 s at most",
    ),
    "agreed": Scene(
        mails=2_000,
        outage=0,
        rate=1_000,
        workers=3,
        processes=8,
        call_seconds=0.1,
        agreed=20.0,
        goal="at least 90 % used, no second above the rate + 5 %",
    ),
}


@dataclass
class MailProvider:
    """The provider: what it does now, and every call so far.

    Of a call it notes when it came, whether it was down, its answer, and when the task began.
    """

    scene: Scene
    is_down: bool = True
    calls: list[tuple[float, str, int, float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    _seconds: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, key: str, began: float) -> tuple[int, float]:
        """Take a call; return the status and how long the answer takes."""
        with self._lock:
            now = time.time()
            status, seconds = 200, self.scene.call_seconds
            if self.is_down:
                is_hung = self.scene.down == "hang"
                status = 503 if self.scene.down in ("trusted", "hang") else int(self.scene.down)
                seconds = self.scene.timeout + 5 if is_hung else 0.0
            elif self._seconds[int(now)] >= self.scene.rate:
                status, seconds = 429, 0.0
            else:
                self._seconds[int(now)] += 1
                self.sent[key] += 1
            self.calls.append((now, "down" if self.is_down else "up", status, began))
            return status, seconds


@contextmanager
def _serving(provider: MailProvider) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            key, _, began = self.path[1:].partition("?")
            if key == "other":
                provider.waits.append(float(began))
                status, seconds = 200, 0.0
            else:
                status, seconds = provider.judge(key, float(began))
            time.sleep(seconds)
            self.send_response(status)
            if status == 429 or (status == 503 and provider.scene.down == "trusted"):
                self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

        def handle_error(self, *args: Any) -> None:
            """Say nothing of callers that have hung up."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextmanager
def _redis() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0", server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait()


def play(scene: Scene, logs: Path) -> dict[str, Any]:
    """Play one scene to its end, and return its figures by name."""
    provider = MailProvider(scene, is_down=scene.outage > 0)
    with ExitStack() as stack:
        endpoint, url = stack.enter_context(ministack()), stack.enter_context(_serving(provider))
        sqs = sqs_client(endpoint)
        queue = create_queue(sqs, "fleet", max_receive_count=1_000)
        celery: dict[str, Any] = {
            "broker_url": f"sqs://testing:testing@{endpoint.partition('//')[2]}//",
            "broker_transport_options": {
                "region": "us-east-1",
                "is_secure": False,
                "predefined_queues": {queue.name: {"url": queue.url}},
            },
            "task_default_queue": queue.name,
            "task_ignore_result": True,
            "worker_enable_remote_control": False,
        }
        store = None
        if scene.agreed is not None:
            redis_url, store = stack.enter_context(_redis())
            celery["sqs_backoff"] = {"store": redis_url, "secret": "fleet"}
        settings = {"celery": celery, "url": url, "rate": scene.agreed, "timeout": scene.timeout}
        client = Celery("client", set_as_current=False)
        client.conf.update(celery)
        with ThreadPoolExecutor(8) as threads:
            send = client.send_task
            list(threads.map(lambda n: send("benchmarks.fleet_app.mail", (n,)), range(scene.mails)))
        fleet = list(
            ThreadPoolExecutor(scene.workers).map(
                lambda number: stack.enter_context(
                    worker(
                        "benchmarks.fleet_app",
                        pool=scene.pool,
                        concurrency=scene.processes,
                        loglevel="INFO",
                        env={"FLEET_SETTINGS": json.dumps(settings)},
                        log_file=logs / f"worker-{number}.log",
                    )
                ),
                range(scene.workers),
            )
        )
        recovered_at = _let_time_pass(scene, provider, client, fleet, store)
        (logs / "calls.json").write_text(json.dumps(provider.calls))
        return _figures(scene, provider, recovered_at)


def _let_time_pass(
    scene: Scene, provider: MailProvider, client: Any, fleet: list[Worker], store: Any
) -> float:
    while not provider.calls:
        time.sleep(_LOOK_SECONDS)
    first = provider.calls[0][0]
    plan: list[tuple[float, Callable[[], object]]] = []
    if store is not None:
        plan = [
            (10.0, fleet[0].kill),
            (50.0, lambda: store.send_signal(signal.SIGSTOP)),
            (70.0, lambda: store.send_signal(signal.SIGCONT)),
        ]
    others = 0
    recovered_at = first if not provider.is_down else 0.0
    while True:
        seconds = time.time() - first
        if provider.is_down and seconds >= scene.outage:
            provider.is_down = False
            recovered_at = time.time()
        while plan and seconds >= plan[0][0]:
            plan.pop(0)[1]()
        if provider.is_down and scene.others and seconds > 10 and others < (seconds - 10) * 4:
            client.send_task("benchmarks.fleet_app.other", (time.time(),))
            others += 1
        is_over = len(provider.sent) >= scene.mails
        if is_over or seconds > scene.outage + scene.patience:
            time.sleep(scene.call_seconds + 1.0)
            return recovered_at
        time.sleep(_LOOK_SECONDS / (4 if scene.others else 1))


def _figures(scene: Scene, provider: MailProvider, recovered_at: float) -> dict[str, Any]:
    calls = provider.calls
    sent = [at for at, _, status, _ in calls if status == 200]
    if scene.agreed is not None:
        began, ended = sent[0], sent[-1]
        seconds = Counter(int(at - began) for at in sent)
        used = [seconds[second] for second in range(1, int(ended - began))]
        return {
            "used, of the agreed rate": f"{100 * sum(used) / len(used) / scene.agreed:.1f} %",
            "busiest second, by the tasks' starts": _busiest([each[3] for each in calls]),
            "by their arrival": _busiest([each[0] for each in calls]),
            "mails left": scene.mails - len(provider.sent),
            "sent twice": provider.sent.total() - len(provider.sent),
        }
    shortest = scene.mails / scene.rate + scene.call_seconds
    took = max(sent, default=time.time()) + scene.call_seconds - recovered_at
    refused = sum(status == 429 for _, _, status, _ in calls)
    figures: dict[str, Any] = {
        "calls while down": sum(when == "down" for _, when, *_ in calls),
        "times the shortest": f"{took / shortest:.2f} ({took:.1f} s of {shortest:.1f})",
        "turned away (429)": f"{refused} ({100 * refused / scene.mails:.1f} %)",
        "mails left": scene.mails - len(provider.sent),
        "sent twice": provider.sent.total() - len(provider.sent),
    }
    if provider.waits:
        waits = sorted(provider.waits)
        figures["tasks of another provider start after"] = (
            f"{median(waits):.1f} s, nine of ten {waits[int(0.9 * len(waits))]:.1f} s,"
            f" all {waits[-1]:.1f} s ({len(waits)} tasks)"
        )
    return figures


def _busiest(calls: list[float]) -> int:
    """Return the most calls in any second, whenever it begins."""
    at = sorted(calls)
    return max(bisect_left(at, first + 1) - n for n, first in enumerate(at))


@click.command(help=__doc__)
@click.argument("scene", type=click.Choice(list(SCENES)), default="mails")
@click.option("--runs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), help="Kept there.")
def main(*, scene: str, runs: int, logs: Path | None) -> None:
    """Play and print."""
    wanted = SCENES[scene]
    click.echo(f"{scene}: {wanted.goal}")
    for _ in range(runs):
        directory = logs or Path(tempfile.mkdtemp(prefix="fleet-logs-"))
        directory.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()[0]
        figures = play(wanted, directory)
        click.echo("; ".join(f"{name}: {value}" for name, value in figures.items()))
        click.echo(f"  load average: {load:.1f}")
        if logs is None:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
