"""Fills a queue with task messages, exactly as Celery writes them, ten in a call."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

from celery import Celery

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["fill"]


def fill(client: SQSClient, queue_url: str, task_name: str, count: int) -> None:
    """Put ``count`` calls of a task without arguments on an empty queue."""
    bodies = list(_bodies(_sample(client, queue_url, task_name), count))
    for start in range(0, count, 10):
        batch = enumerate(bodies[start : start + 10])
        answer = client.send_message_batch(
            QueueUrl=queue_url,
            Entries=[{"Id": str(i), "MessageBody": body} for i, body in batch],
        )
        assert not answer.get("Failed"), answer["Failed"]


def _sample(client: SQSClient, queue_url: str, task_name: str) -> tuple[str, str]:
    """Let Celery send one message, and take it off the queue: (task id, decoded body)."""
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
