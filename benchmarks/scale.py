"""Measure a worker with many queues, greenlets or messages, on a fast local SQS.

\b
busy    tasks per second on one of 15 queues
quiet   time from a send to the start of the task on one of 50 empty queues,
        and CPU time and memory of the main process per queue
gevent  tasks per second in 200 greenlets, and the time of a stop
idle    calls to SQS and CPU time of an idle worker
held    CPU time and calls to hold 25,000 messages
memory  memory of the main process during 100,000 tasks
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from celery_sqs_backoff.testing import create_local_queue
from tests.support.fault_proxy import fault_proxy
from tests.support.processes import eventually
from tests.support.servers import ministack, sqs_client
from tests.support.workers import Worker, worker

from .load import fill, take
from .measure import cpu_seconds
from .tasks import RECORD_BYTES, TASK_NAME

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue

__all__ = ["SCENARIOS", "main"]

GREENLETS = 200
SLEEP_SECONDS = 0.2


class Scale:
    """An SQS server with many queues, and workers on them."""

    def __init__(self, client: SQSClient, directory: Path) -> None:
        self._client = client
        self._directory = directory
        self.endpoint = client.meta.endpoint_url
        self._sample = take(client, create_local_queue(client).url, TASK_NAME)

    def queues(self, count: int) -> list[LocalQueue]:
        return [create_local_queue(self._client) for _ in range(count)]

    def fill(self, queue: LocalQueue, tasks: int) -> None:
        fill(self._client, queue.url, TASK_NAME, tasks, sample=self._sample)

    @contextmanager
    def worker(
        self,
        queues: list[LocalQueue],
        *,
        endpoint: str = "",
        sleep: float = 0,
        multiplier: int = 4,
        **options: object,
    ) -> Iterator[tuple[Worker, Path]]:
        """Run a worker, and yield the directory of its records."""
        records = Path(tempfile.mkdtemp(dir=self._directory))
        predefined = {queue.name: {"url": queue.url} for queue in queues}
        with worker(
            "benchmarks.app",
            loglevel="WARNING",
            queues=[queue.name for queue in queues],
            env={
                "BENCH_SCENARIO": "ours-sleep",
                "BENCH_SLEEP": str(sleep),
                "BENCH_ENDPOINT": endpoint or self.endpoint,
                "BENCH_QUEUE_URL": queues[0].url,
                "BENCH_RECORDS": str(records),
                "BENCH_PREFETCH_MULTIPLIER": str(multiplier),
                "BENCH_TRANSPORT_OPTIONS": json.dumps({"predefined_queues": predefined}),
            },
            **options,  # type: ignore[arg-type]
        ) as running:
            yield running, records

    @staticmethod
    def times(records: Path) -> list[float]:
        """Return when tasks started, sorted, in seconds of the machine's monotonic clock."""
        return sorted(float(t) for file in records.iterdir() for t in file.read_text().split())

    @staticmethod
    def wait(records: Path, executions: int, timeout: float = 60) -> None:
        def done() -> bool:
            return sum(f.stat().st_size for f in records.iterdir()) >= executions * RECORD_BYTES

        eventually(done, timeout=timeout, interval=0.005)


def busy(scale: Scale) -> str:
    tasks, count = 400, 15
    queues = scale.queues(count)
    scale.fill(queues[0], tasks)
    with scale.worker(queues) as (_, records):
        scale.wait(records, tasks)
    times = Scale.times(records)
    return f"{tasks} tasks on one of {count} queues: {(tasks - 1) / (times[-1] - times[0]):.0f}/s"


def quiet(scale: Scale) -> str:
    count, sends = 50, 60
    one, many = scale.queues(1), scale.queues(count)
    with scale.worker(one) as (running, _):
        base_cpu, base_memory = _cost(running)
    with scale.worker(many) as (running, records):
        cpu, memory = _cost(running)
        latencies = []
        for number in range(sends):
            scale.fill(many[number * 7 % count], 1)
            sent_at = time.monotonic()
            scale.wait(records, number + 1)
            latencies.append(max(0.0, Scale.times(records)[-1] - sent_at))
    extra = count - 1
    return (
        f"send to start on {count} quiet queues: p50 {median(latencies) * 1000:.0f} ms,"
        f" max {max(latencies) * 1000:.0f} ms; per queue"
        f" {(memory - base_memory) / extra:.2f} MB and {(cpu - base_cpu) / extra * 1000:.0f} ms CPU"
    )


def gevent(scale: Scale) -> str:
    tasks = 3000
    [queue] = scale.queues(1)
    scale.fill(queue, tasks)
    options = {"pool": "gevent", "concurrency": GREENLETS, "sleep": SLEEP_SECONDS}
    with scale.worker([queue], **options) as (running, records):  # type: ignore[arg-type]
        scale.wait(records, tasks // 4)
        before, cpu = len(Scale.times(records)), cpu_seconds(running.pid)
        scale.wait(records, tasks // 2)
        cpu = (cpu_seconds(running.pid) - cpu) / (len(Scale.times(records)) - before)
        stopped_at = time.monotonic()
        running.stop(signal.SIGTERM, timeout=60)
        seconds = time.monotonic() - stopped_at
    times = [t for t in Scale.times(records) if t <= stopped_at]
    rate = (len(times) - 1) / (times[-1] - times[0])
    return (
        f"gevent {GREENLETS}, tasks of {SLEEP_SECONDS} s: {rate:.0f}/s,"
        f" {cpu * 1000:.1f} ms CPU per task; stops in {seconds:.1f} s"
    )


def idle(scale: Scale) -> str:
    seconds = 45
    with fault_proxy(scale.endpoint) as proxy:
        queues = scale.queues(1)
        with scale.worker(queues, endpoint=proxy.endpoint) as (running, _):
            time.sleep(1)
            proxy.reset()
            before = cpu_seconds(running.pid)
            time.sleep(seconds)
            cpu = cpu_seconds(running.pid) - before
            calls = {name: count.calls for name, count in proxy.counts().items() if count.calls}
    return f"idle for {seconds} s: {calls}, {cpu * 1000:.0f} ms CPU"


def held(scale: Scale) -> str:
    """Let a worker with prefetch multiplier 0 and a slow pool hold all messages."""
    tasks, seconds = 25_000, 40
    [queue] = scale.queues(1)
    with fault_proxy(scale.endpoint) as proxy:
        scale.fill(queue, tasks)
        options = {"endpoint": proxy.endpoint, "sleep": 5.0, "multiplier": 0}
        with scale.worker([queue], **options) as (running, _):  # type: ignore[arg-type]

            def all_received() -> bool:
                return proxy.counts()["ReceiveMessage"].messages >= tasks

            eventually(all_received, timeout=240, interval=0.5)
            time.sleep(2)  # until the worker has taken what it has received
            proxy.reset()
            before = cpu_seconds(running.pid)
            time.sleep(seconds)
            share = (cpu_seconds(running.pid) - before) / seconds
            counts = proxy.counts()
            running.stop(signal.SIGKILL)
    return (
        f"{tasks:,} messages held for {seconds} s, visibility timeout 30 s: {share:.0%} CPU,"
        f" {counts['ChangeMessageVisibilityBatch'].calls / seconds:.0f} renewal calls/s,"
        f" {counts['ReceiveMessage'].messages:,} messages received again"
    )


def memory(scale: Scale) -> str:
    """Measure how the memory of the main process grows while the worker runs many tasks."""
    tasks, at_once = 100_000, 10_000
    [queue] = scale.queues(1)
    grown = []
    with scale.worker([queue], sleep=0, multiplier=32) as (running, records):
        base = _cost(running)[1]
        for done in range(at_once, tasks + 1, at_once):
            scale.fill(queue, at_once)
            scale.wait(records, done, timeout=120)
            grown.append(_cost(running)[1] - base)
    shown = ", ".join(f"{mb:+.0f}" for mb in grown)
    return f"main process, MB after each {at_once:,} of {tasks:,} tasks: {shown}"


SCENARIOS: Mapping[str, Callable[[Scale], str]] = {
    "busy": busy,
    "quiet": quiet,
    "gevent": gevent,
    "idle": idle,
    "held": held,
    "memory": memory,
}


def _cost(running: Worker) -> tuple[float, float]:
    """Return the CPU seconds and the resident MB of a worker's main process."""
    time.sleep(2)
    pages = int(Path(f"/proc/{running.pid}/statm").read_text().split()[1])
    return cpu_seconds(running.pid), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@click.command(help=__doc__)
@click.argument("scenarios", nargs=-1, type=click.Choice(sorted(SCENARIOS)))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
def main(*, scenarios: tuple[str, ...], rounds: int) -> None:
    """Measure, and print a line per round."""
    with tempfile.TemporaryDirectory(prefix="scale-") as directory, ministack() as endpoint:
        scale = Scale(sqs_client(endpoint), Path(directory))
        for name in scenarios or tuple(SCENARIOS):
            for _ in range(rounds):
                click.echo(SCENARIOS[name](scale))


if __name__ == "__main__":
    main()
