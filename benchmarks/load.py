"""Fill a queue with messages of a task, exactly as Celery writes them, ten per call."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit
from uuid import uuid4

import redis
from celery import Celery

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["fill", "fill_redis", "redis_is_empty", "take"]

#: The Redis database of the benchmarks. ``fill_redis`` empties it.
_REDIS_DB = 12
_REDIS_QUEUE = "bench"


def fill(
    client: SQSClient,
    queue_url: str,
    task_name: str,
    count: int,
    *,
    sample: tuple[str, str] | None = None,
) -> None:
    """Put ``count`` calls of a task without arguments on a queue.

    Pass a ``sample`` from :func:`take`. Otherwise this function takes one itself, which needs an
    empty queue without a consumer.
    """
    bodies = list(_bodies(sample or take(client, queue_url, task_name), count))
    for start in range(0, count, 10):
        batch = enumerate(bodies[start : start + 10])
        answer = client.send_message_batch(
            QueueUrl=queue_url,
            Entries=[{"Id": str(i), "MessageBody": body} for i, body in batch],
        )
        assert not answer.get("Failed"), answer["Failed"]


def fill_redis(task_name: str, count: int) -> str:
    """Fill a queue on Redis, and return the broker's URL with the queue's name."""
    database = redis.Redis(db=_REDIS_DB)
    database.flushdb()
    url = f"redis://127.0.0.1:6379/{_REDIS_DB}"
    with Celery("load", broker=url, set_as_current=False) as app:
        app.conf.task_default_queue = _REDIS_QUEUE
        task_id = app.send_task(task_name, ignore_result=True).id
    body = cast("bytes", database.lpop(_REDIS_QUEUE)).decode()
    tag = json.loads(body)["properties"]["delivery_tag"]
    with database.pipeline() as pipeline:
        for _ in range(count):
            copy = body.replace(task_id, str(uuid4())).replace(tag, str(uuid4()))
            pipeline.lpush(_REDIS_QUEUE, copy)
        pipeline.execute()
    return f"{url}/{_REDIS_QUEUE}"


def redis_is_empty() -> bool:
    return not redis.Redis(db=_REDIS_DB).exists(_REDIS_QUEUE, "unacked")


def take(client: SQSClient, queue_url: str, task_name: str) -> tuple[str, str]:
    """Let Celery send one message, and take it off the queue. Return its task ID and its body."""
    with Celery("load", set_as_current=False) as app:
        name = queue_url.rpartition("/")[2]
        app.conf.update(
            broker_url=f"sqs://testing:testing@{urlsplit(client.meta.endpoint_url).netloc}//",
            broker_transport_options={
                "region": "us-east-1",
                "is_secure": False,
                "predefined_queues": {name: {"url": queue_url}},
            },
            task_default_queue=name,
        )
        task_id = app.send_task(task_name, ignore_result=True).id
    answer = client.receive_message(QueueUrl=queue_url, WaitTimeSeconds=5)
    [message] = answer["Messages"]
    client.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
    return task_id, b64decode(message["Body"]).decode()


def _bodies(sample: tuple[str, str], count: int) -> Iterator[str]:
    task_id, body = sample
    for _ in range(count):
        yield b64encode(body.replace(task_id, str(uuid4())).encode()).decode()
