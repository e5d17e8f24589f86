"""On Redis and RabbitMQ, Celery's own retry runs the task again after the delay of our policy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Queue

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import Record, note
from tests.support.redis_database import redis_url
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
def mail(self: Any, broker: str) -> None:
    note(task="elsewhere.mail", broker=broker, retries=self.request.retries)
    if self.request.retries < 2:
        raise ProviderDown


#: By name: the URL of the broker, and the arguments of the queue.
BROKERS: dict[str, tuple[str, dict[str, str]]] = {
    "redis": (redis_url(), {}),
    "rabbitmq-classic": ("amqp://127.0.0.1//", {"x-queue-type": "classic"}),
    # Celery's native delayed delivery lets the broker hold the message until it is due.
    "rabbitmq-quorum": ("amqp://127.0.0.1//", {"x-queue-type": "quorum"}),
}


@contextmanager
def running(broker: str, record: Record) -> Iterator[None]:
    """Run a worker on a queue of its own, and send it a mail."""
    url, arguments = BROKERS[broker]
    name = f"elsewhere-{uuid4().hex[:8]}"
    settings = {"broker_url": url, "task_default_queue": name, "worker_detect_quorum_queues": 1}
    env = record.env | {
        _SETTINGS_VARIABLE: json.dumps(settings),
        "TEST_QUEUE": name,
        "TEST_QUEUE_ARGUMENTS": json.dumps(arguments),
    }
    sender = Celery("sender", broker=url, set_as_current=False)
    queue = Queue(name, queue_arguments=arguments)
    sender.conf.task_queues = [queue]
    options = ("--prefetch-multiplier", "1")
    try:
        with worker(
            __name__, pool="threads", concurrency=1, env=env, options=options, stop_timeout=0
        ):
            sender.send_task("elsewhere.mail", (broker,), queue=name)
            yield
    finally:
        with sender.connection_for_write() as connection:
            queue(connection.default_channel).delete()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Run one worker per broker at the same time, until each has run its task three times."""
    record = Record(tmp_path_factory.mktemp("brokers") / "record")
    with ExitStack() as stack, ThreadPoolExecutor(len(BROKERS)) as threads:
        contexts = [running(broker, record) for broker in BROKERS]
        for started in [threads.submit(stack.enter_context, context) for context in contexts]:
            started.result()
        eventually(lambda: len(record.entries(retries=2)) == len(BROKERS), timeout=30)
    return record


@pytest.mark.hazard("H23")
@pytest.mark.redis
@pytest.mark.rabbitmq
@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.story("R5")
def test_retry(record, broker):
    """A task on another broker is retried until it succeeds, after the delay of its policy."""
    runs = record.entries(broker=broker)
    assert [run["retries"] for run in runs] == [0, 1, 2]
    gaps = [later["at"] - earlier["at"] for earlier, later in pairwise(runs)]
    assert all(gap >= 0.9 for gap in gaps), gaps
