"""How much CPU does watching a worker cost per task, with all adapters on?

The events of tasks that succeed go through every adapter: log lines, signals, what waits, status
and Prometheus. That time is compared with the CPU time that a real worker takes for a no-op task,
in its main process and in its pool.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from celery_sqs_backoff.observe.announce import Announce
from celery_sqs_backoff.observe.board import WorkerNow
from celery_sqs_backoff.observe.events import Events, Polled, RunEnded, Settled, WorkerEvent
from celery_sqs_backoff.observe.log_lines import LogLines
from celery_sqs_backoff.observe.metrics import Metrics
from celery_sqs_backoff.observe.waiting import Waiting

from .measure import Setup, bench, cpu_seconds

__all__ = ["main", "microseconds_per_task", "worker_microseconds"]

#: Messages of one receive, and of one delete.
_BATCH = 10

_LATENCY_MS = 10


def _tasks(number: int) -> Iterator[WorkerEvent]:
    """What a worker emits for tasks that succeed at their first run."""
    of_task: dict[str, Any] = {"queue": "mails", "task": "shop.send_mail"}
    for start in range(0, number, _BATCH):
        ids = tuple(f"message-{start + n}" for n in range(_BATCH))
        yield Polled(queue="mails", message_ids=ids)
        for message_id in ids:
            facts = {**of_task, "task_id": message_id, "message_id": message_id}
            yield RunEnded(**facts, outcome="succeeded", attempt=1)
        yield Settled(queue="mails", action="DeleteMessageBatch", failed=0)


def _observed() -> Events:
    return Events(LogLines(), Announce(lambda name: None), Waiting(), Metrics(WorkerNow))


def microseconds_per_task(*, tasks: int, repetitions: int) -> list[float]:
    """CPU time of all adapters, without that of making the events."""
    prepared = list(_tasks(tasks))
    emit: Callable[[WorkerEvent], None] = _observed().emit
    found = []
    with _without_collector():
        for _ in range(repetitions + 1):
            started = time.process_time()
            for event in prepared:
                emit(event)
            found.append((time.process_time() - started) / tasks * 1e6)
    return found[1:]  # the first has made the labels


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def worker_microseconds(tasks: int) -> tuple[float, float]:
    """CPU time per no-op task of a real worker: its main process, and with its pool."""
    pool: list[float] = []

    def look(pid: int) -> None:
        pool.append(sum(cpu_seconds(child) for child in _children(pid)))

    with bench(latency_ms=_LATENCY_MS) as server:
        run = server.run(Setup(scenario="ours", tasks=tasks), look=look)
    main = run.main_cpu_seconds * 1e6
    return main, main + (pool[-1] - pool[0]) / tasks * 1e6


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@click.command(help=__doc__)
@click.option("--tasks", default=4000, show_default=True, type=click.IntRange(100))
@click.option("--repetitions", default=15, show_default=True, type=click.IntRange(1))
def main(*, tasks: int, repetitions: int) -> None:
    """Measure and print."""
    click.echo(f"load average: {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    main_cpu, all_cpu = worker_microseconds(tasks)
    click.echo(f"a worker's CPU per no-op task: {all_cpu:.0f} µs, {main_cpu:.0f} of them in main")
    found = microseconds_per_task(tasks=tasks, repetitions=repetitions)
    cost = median(found)
    click.echo(
        f"all adapters: {cost:.1f} µs per task ({min(found):.1f}..{max(found):.1f}):"
        f" {cost / all_cpu:.1%} of a no-op task, {cost / main_cpu:.1%} of its part in main"
    )


if __name__ == "__main__":
    main()
