"""What does ``provider=`` cost a message that succeeds, in the worker's main process?

The gate is asked before the run and told of its end, as the worker does, while the provider is
well. Beside it: the main process's CPU per empty task, measured with a real worker on a local SQS.
"""

from __future__ import annotations

import os
import random
import time
from statistics import median
from typing import Any

import click

from celery_sqs_backoff import FullJitter, Provider
from celery_sqs_backoff.retry.decision import End, RunEnd
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import read_queue
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease
from celery_sqs_backoff.worker.providers import Gates
from tests.support.fake_sqs import Clock, FakeSQS

from .observe import worker_microseconds

__all__ = ["main", "measure"]


class _Task:
    """The parts of a task that the gates look at."""

    def __init__(self, options: Options) -> None:
        self.backoff_options = options


def _leases(number: int) -> tuple[Keeper, FakeSQS, list[Lease]]:
    clock = Clock(time.time())
    sqs = FakeSQS(clock)
    url = sqs.create_queue(QueueName="mail")["QueueUrl"]
    calls: Any = Calls(sqs, url)  # type: ignore[arg-type]
    queue, keeper = read_queue(calls, url, now=clock.now), Keeper()
    leases = []
    for i in range(number):
        sqs.send_message(QueueUrl=url, MessageBody=str(i))
        (message,) = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=1)["Messages"]
        leases.append(
            Lease(
                calls=calls,
                queue=queue,
                message=message,
                body=message["Body"],
                delivery=Delivery.from_sqs(message, queue_url=url, received_at=clock.now),
                received_at=clock.now,
                keeper=keeper,
                free=lambda: None,
            )
        )
    return keeper, sqs, leases


def measure(*, repetitions: int = 15, runs: int = 2_000) -> tuple[list[float], int]:
    """Return the seconds of CPU per message, one of each repetition, and the calls to SQS."""
    options = Options(provider=Provider("mail"), backoff=FullJitter())
    task, ended = _Task(options), RunEnd(End.RETURNED)
    keeper, sqs, leases = _leases(runs)
    sqs_calls: list[str] = []
    sqs.during_call = lambda action, bodies: sqs_calls.append(action)
    gates = Gates(keeper, room=lambda: 8, rng=random.Random(0))
    found = []
    for repetition in range(repetitions + 1):
        started = time.process_time()
        for lease in leases:
            gate = gates.of_call(task, dict)
            if gate is None or gate.keeps_back(lease, options, int):
                raise AssertionError("the provider is well: nothing is hidden")
            gate.ended(lease, ended)
        if repetition:  # the first warms up
            found.append((time.process_time() - started) / runs)
    gates.pacer.stop()
    return found, len(sqs_calls)


@click.command(help=__doc__)
@click.option("--repetitions", default=15, show_default=True, type=click.IntRange(1))
@click.option("--runs", default=2_000, show_default=True, type=click.IntRange(1), help="In each.")
@click.option("--tasks", default=2_000, show_default=True, type=click.IntRange(100), help="Empty.")
def main(*, repetitions: int, runs: int, tasks: int) -> None:
    """Measure and print."""
    click.echo(f"load average: {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    task, _ = worker_microseconds(tasks)
    seconds, calls = measure(repetitions=repetitions, runs=runs)
    low, middle, high = (1e6 * f(seconds) for f in (min, median, max))
    click.echo(f"gate asked and told: {middle:.1f} µs per message ({low:.1f}..{high:.1f})")
    click.echo(f"of a task's {task:.0f} µs in the main process: {100 * middle / task:.1f} %")
    click.echo(f"calls to SQS: {calls}")


if __name__ == "__main__":
    main()
