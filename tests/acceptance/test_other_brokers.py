"""On another broker the same task is retried as a Celery user expects, after our delay."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Queue

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import Record, note
from tests.support.workers import worker

from .stage import _SETTINGS_VARIABLE, app_of_this_module

app = app_of_this_module()
if os.environ.get("TEST_QUEUE"):  # in a worker
    app.conf.task_queues = [
        Queue(
            os.environ["TEST_QUEUE"],
            queue_arguments=json.loads(os.environ["TEST_QUEUE_ARGUMENTS"]),
        )
    ]


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="elsewhere.mail",
    retry_on=ProviderDown,
    backoff=Schedule([1]),
)
def mail(self: Any) -> None:
    note(task="elsewhere.mail", retries=self.request.retries)
    if self.request.retries < 2:
        raise ProviderDown


@contextmanager
def running(broker: str, record: Record, **arguments: str) -> Iterator[Callable[[], object]]:
    """A worker on a queue of its own; yields what sends it a mail."""
    name = f"elsewhere-{uuid4().hex[:8]}"
    settings = {"broker_url": broker, "task_default_queue": name, "worker_detect_quorum_queues": 1}
    env = record.env | {
        _SETTINGS_VARIABLE: json.dumps(settings),
        "TEST_QUEUE": name,
        "TEST_QUEUE_ARGUMENTS": json.dumps(arguments),
    }
    sender = Celery("sender", broker=broker, set_as_current=False)
    queue = Queue(name, queue_arguments=arguments)
    sender.conf.task_queues = [queue]
    options = ("--prefetch-multiplier", "1")
    try:
        with worker(
            __name__, pool="threads", concurrency=1, env=env, options=options, stop_timeout=2
        ):
            yield lambda: sender.send_task("elsewhere.mail", queue=name)
    finally:
        with sender.connection_for_write() as connection:
            queue(connection.default_channel).delete()


def is_retried_with_our_delay(send: Callable[[], object], record: Record) -> None:
    send()
    eventually(lambda: len(record.entries(task="elsewhere.mail")) == 3, timeout=30)
    runs = record.entries(task="elsewhere.mail")
    assert [run["retries"] for run in runs] == [0, 1, 2]
    gaps = [b["at"] - a["at"] for a, b in pairwise(runs)]
    assert all(gap >= 0.9 for gap in gaps), gaps


@pytest.mark.hazard("H23")
@pytest.mark.redis
def test_on_redis(record: Record, redis_vhost: str) -> None:
    with running(redis_vhost, record) as send:
        is_retried_with_our_delay(send, record)


@pytest.mark.hazard("H23")
@pytest.mark.rabbitmq
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_on_rabbitmq(record: Record, kind: str) -> None:
    """On a quorum queue the delay is Celery's native delayed delivery: the broker waits."""
    with running("amqp://127.0.0.1//", record, **{"x-queue-type": kind}) as send:
        is_retried_with_our_delay(send, record)
