"""Measure how much CPU time our base class costs a task that succeeds, in the pool process.

Celery's own tracer runs the same empty task in turns as a plain task and as an ``SQSBackoffTask``,
with the request that a worker would pass. The difference is the cost of our class. It does not
include the work of the main process, which receives and deletes the message.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from uuid import uuid4

import click
from celery import Celery, Task
from celery.app.trace import build_tracer

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task.handover import DELIVERY_KEY

__all__ = ["main", "measure", "show"]

QUEUE_URL = "https://sqs.us-east-1.amazonaws.com/123456789012/mail"


def _request(app: Celery, task: Task, task_id: str) -> dict[str, Any]:
    """Return the request that the pool process would get, with all headers."""
    message = app.amqp.as_task_v2(task_id, task.name, (7, "welcome"), {}, ignore_result=True)
    now = time.time()
    delivery = Delivery(
        message_id=str(uuid4()),
        queue_url=QUEUE_URL,
        received_at=now,
        receive_count=1,
        first_received_at=now,
        sent_at=now,
        max_receive_count=10,
        retention_seconds=345_600,
    )
    facts: dict[str, Any] = {
        "exchange": "",
        "routing_key": "mail",
        "sqs_queue": QUEUE_URL,
        "sqs_message": {"MessageId": delivery.message_id, "ReceiptHandle": "h" * 180},
    }
    # The body is already decoded. A JSON round trip makes the headers as SQS would return them.
    headers = json.loads(json.dumps(message.headers, default=str))
    return {
        **headers,
        **message.properties,
        "properties": {**message.properties, "delivery_info": facts},
        "delivery_info": {"exchange": "", "routing_key": "mail", "redelivered": False},
        "hostname": "celery@worker",
        "args": [7, "welcome"],
        "kwargs": {},
        DELIVERY_KEY: delivery,
    }


def _tracer(app: Celery, base: type[Task]) -> Callable[[int], float]:
    """Return a function that runs the task this often, and returns the CPU seconds per run."""

    @app.task(base=base, bind=True, name=f"overhead.{base.__name__}", acks_late=True)
    def send_email(self: Task, customer_id: int, template: str) -> None: ...

    # A worker makes the tracer in the same way.
    send_email.__trace__ = build_tracer(send_email.name, send_email, app=app)
    trace = send_email.__trace__
    task_id = str(uuid4())
    request = _request(app, send_email, task_id)
    assert trace(task_id, [7, "welcome"], {}, dict(request)).info is None, "the task must succeed"

    def run(times: int) -> float:
        started = time.process_time()
        for _ in range(times):
            trace(task_id, [7, "welcome"], {}, dict(request))
        return (time.process_time() - started) / times

    return run


def measure(*, repetitions: int = 15, runs: int = 3000) -> tuple[list[float], list[float]]:
    """Return the CPU seconds per run of the plain task and of ours, with a pair per repetition."""
    app = Celery("overhead", set_as_current=False)
    app.conf.update(broker_url="memory://", task_ignore_result=True)
    plain, ours = _tracer(app, Task), _tracer(app, SQSBackoffTask)
    app.finalize()
    plain(runs), ours(runs)  # warm up
    pairs = []
    gc.disable()
    try:
        for i in range(repetitions):
            first, second = (plain, ours) if i % 2 else (ours, plain)
            a, b = first(runs), second(runs)
            pairs.append((a, b) if i % 2 else (b, a))
            gc.collect()
    finally:
        gc.enable()
    return [p for p, _ in pairs], [o for _, o in pairs]


def show(*, repetitions: int = 15, runs: int = 3000) -> None:
    """Measure, and print the CPU times and their ratio."""
    click.echo("CPU time of an empty task that succeeds, in the pool process:")
    plain, ours = measure(repetitions=repetitions, runs=runs)
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    for name, seconds in (("plain Celery task", plain), ("SQSBackoffTask", ours)):
        click.echo(f"  {name:<24} {median(seconds) * 1e6:6.1f} µs per run")
    click.echo(
        f"  {'ratio':<24} {median(ratios):6.2f}    ({min(ratios):.2f}..{max(ratios):.2f},"
        f" {repetitions} repetitions)"
    )


@click.command(help=__doc__)
@click.option("--repetitions", default=15, show_default=True, type=click.IntRange(1))
@click.option(
    "--runs", default=3000, show_default=True, type=click.IntRange(1), help="Runs per repetition."
)
def main(*, repetitions: int, runs: int) -> None:
    show(repetitions=repetitions, runs=runs)


if __name__ == "__main__":
    main()
