"""Measure how a real worker empties a full queue, and count its calls to SQS."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from celery_sqs_backoff.testing import create_local_queue
from tests.support import loop_probe
from tests.support.fault_proxy import Count, FaultProxy, fault_proxy
from tests.support.processes import eventually
from tests.support.servers import ministack, sqs_client
from tests.support.workers import worker

from .load import fill, fill_redis, redis_is_empty
from .tasks import RECORD_BYTES, TASK_NAME

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue

__all__ = ["Bench", "Run", "Setup", "bench"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The setup of a measurement. Each task fails ``failures`` times before it succeeds."""

    scenario: str
    tasks: int
    failures: int = 0
    prefetch_multiplier: int = 4
    polling_interval_seconds: float = 0
    processes: int = 2
    watch_loop: bool = False

    @property
    def is_on_redis(self) -> bool:
        return self.scenario.startswith("redis")

    @property
    def executions(self) -> int:
        return self.tasks * (self.failures + 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of a measurement. Times are seconds since the first execution.

    ``seconds`` is the time of the last execution. ``settled_seconds`` is the time at which the
    queue was empty. The benchmark looks every 50 ms. A worker deletes messages after the
    executions, so the second time shows whether it falls behind.
    """

    executions: int
    seconds: float
    settled_seconds: float
    calls: Mapping[str, Count]
    blockages: list[float]
    #: CPU time of the worker's main process per execution, counted from when the worker was ready.
    main_cpu_seconds: float

    @property
    def rate(self) -> float:
        """Executions per second."""
        return (self.executions - 1) / self.seconds

    @property
    def settled_rate(self) -> float:
        """Executions per second, counted until SQS has deleted all messages."""
        return self.executions / self.settled_seconds

    def calls_per_execution(self, *actions: str) -> float:
        """Return the calls per execution of these actions, single or batch, or of all actions."""
        wanted = [
            count.calls
            for action, count in self.calls.items()
            if not actions or action.removesuffix("Batch") in actions
        ]
        return sum(wanted) / self.executions


class Bench:
    """An SQS server behind a proxy that counts calls. Only the workers call through the proxy."""

    def __init__(self, client: SQSClient, proxy: FaultProxy, directory: Path) -> None:
        self._client = client
        self._proxy = proxy
        self._directory = directory
        self._number = count(1)

    def run(
        self,
        setup: Setup,
        *,
        timeout: float = 120,
        look: Callable[[int], object] = lambda pid: None,
    ) -> Run:
        """Fill a new queue, let a new worker empty it, and return the figures.

        Args:
            setup: the tasks and the settings of the worker.
            timeout: the worker must empty the queue within these seconds.
            look: called with the pid of the main process when the worker is ready, and at the end.

        Raises:
            AssertionError: the queue was not empty in time, or a task ran too often or too seldom.
        """
        directory = self._directory / str(next(self._number))
        records = directory / "records"
        records.mkdir(parents=True)
        if setup.is_on_redis:
            queue_url, is_empty = fill_redis(TASK_NAME, setup.tasks), redis_is_empty
        else:
            queue = create_local_queue(self._client, visibility_timeout_seconds=300)
            queue_url, is_empty = queue.url, partial(self._is_empty, queue)
            fill(self._client, queue_url, TASK_NAME, setup.tasks)
        self._proxy.reset()
        lag_file = directory / "lag"
        probe = loop_probe.options(lag_file) if setup.watch_loop else {"env": {}, "include": ()}
        with worker(
            "benchmarks.app",
            concurrency=setup.processes,
            loglevel="WARNING",
            env={
                "BENCH_SCENARIO": setup.scenario,
                "BENCH_FAILURES": str(setup.failures),
                "BENCH_ENDPOINT": self._proxy.endpoint,
                "BENCH_QUEUE_URL": queue_url,
                "BENCH_RECORDS": str(records),
                "BENCH_PREFETCH_MULTIPLIER": str(setup.prefetch_multiplier),
                "BENCH_TRANSPORT_OPTIONS": json.dumps(
                    {"polling_interval": setup.polling_interval_seconds}
                ),
                **probe["env"],
            },
            include=probe["include"],
        ) as running:
            look(running.pid)
            cpu_before, before = cpu_seconds(running.pid), _executions(records)
            eventually(
                lambda: _executions(records) >= setup.executions and is_empty(),
                timeout=timeout,
                message=lambda: (
                    f"{setup}: {_executions(records)} executions, and the queue is not empty\n"
                    f"{running.log()}"
                ),
            )
            settled_at = time.monotonic()
            cpu = cpu_seconds(running.pid) - cpu_before
            look(running.pid)
            calls = self._proxy.counts()
            running.kill()  # the worker is idle. A stop would wait for the end of its long poll
        times = sorted(float(t) for file in records.iterdir() for t in file.read_text().split())
        assert len(times) == setup.executions, f"{setup}: {len(times)} executions"
        return Run(
            executions=len(times),
            seconds=times[-1] - times[0],
            settled_seconds=settled_at - times[0],
            calls=calls,
            blockages=loop_probe.blockages(lag_file) if setup.watch_loop else [],
            main_cpu_seconds=cpu / max(1, len(times) - before),
        )

    def _is_empty(self, queue: LocalQueue) -> bool:
        found = self._client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])
        return all(
            found["Attributes"][f"ApproximateNumberOfMessages{kind}"] == "0"
            for kind in ("", "NotVisible", "Delayed")
        )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _executions(records: Path) -> int:
    return sum(file.stat().st_size for file in records.iterdir()) // RECORD_BYTES


@contextmanager
def bench(*, latency_ms: float) -> Iterator[Bench]:
    """Start ministack, and a proxy that adds ``latency_ms`` to each call."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        ministack() as endpoint,
        fault_proxy(endpoint, latency_ms=latency_ms) as proxy,
    ):
        yield Bench(sqs_client(endpoint), proxy, Path(directory))
