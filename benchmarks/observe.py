"""Measure how much CPU time the observers of a worker take for each task.

The benchmark sends the events of tasks that succeed to all observers: log lines, signals, status
and Prometheus. It compares their CPU time with the CPU time that a real worker takes for an empty
task, in its main process and in its pool.
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

#: The number of messages of one receive, and of one delete.
_BATCH = 10

_LATENCY_MS = 10


def _tasks(number: int) -> Iterator[WorkerEvent]:
    """Yield the events of a worker for tasks that succeed at their first run."""
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
    """Return the CPU time of all observers per task, one figure for each repetition."""
    prepared = list(_tasks(tasks))
    emit: Callable[[WorkerEvent], None] = _observed().emit
    found = []
    with _without_collector():
        for _ in range(repetitions + 1):
            started = time.process_time()
            for event in prepared:
                emit(event)
            found.append((time.process_time() - started) / tasks * 1e6)
    return found[1:]  # the first repetition has also created Prometheus's labels


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def worker_microseconds(tasks: int) -> tuple[float, float]:
    """Return the CPU time of a real worker per empty task: of the main process, and in total."""
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
    """Measure, and print the cost of the observers."""
    click.echo(f"load average: {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    main_cpu, all_cpu = worker_microseconds(tasks)
    click.echo(
        f"a worker's CPU time per empty task: {all_cpu:.0f} µs, {main_cpu:.0f} of them in its main"
        " process"
    )
    found = microseconds_per_task(tasks=tasks, repetitions=repetitions)
    cost = median(found)
    click.echo(
        f"all observers: {cost:.1f} µs per task ({min(found):.1f}..{max(found):.1f}), which is"
        f" {cost / all_cpu:.1%} of the whole and {cost / main_cpu:.1%} of the main process"
    )


if __name__ == "__main__":
    main()
