"""A queue with a dead-letter queue on a real server, an app, and helpers for redrives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery

from celery_sqs_backoff.redrive import RedriveReport, redrive
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME, DeadLetterRecord
from celery_sqs_backoff.testing import LocalQueue, local_sqs_settings

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


class RedriveStage:
    """A queue, its dead-letter queue and an app.

    The test calls SQS with the client ``sqs``, and the app calls it at ``endpoint``.
    """

    def __init__(self, sqs: SQSClient, endpoint: str, queue: LocalQueue) -> None:
        assert queue.dlq is not None
        self.sqs, self.queue, self.dlq = sqs, queue, queue.dlq
        self.app = Celery("redrive", set_as_current=False)
        self.app.conf.update(local_sqs_settings(endpoint, queue))
        self.events: list[Any] = []

    def redrive(self, source: str | None = "", **options: Any) -> RedriveReport:
        """Redrive the dead-letter queue, and keep all events in ``events``."""
        on_event: Callable[[Any], None] = options.pop("on_event", lambda event: None)

        def both(event: Any) -> None:
            self.events.append(event)
            on_event(event)

        return redrive(
            self.app, self.dlq.name if source == "" else source, on_event=both, **options
        )

    def ids(self, kind: type[Any]) -> set[str]:
        return ids_of(self.events, kind)

    def fill(self, *bodies: str, **entry: Any) -> list[str]:
        """Put messages with these bodies on the dead-letter queue."""
        for start in range(0, len(bodies), 10):
            entries = [
                {"Id": str(i), "MessageBody": body, **entry}
                for i, body in enumerate(bodies[start : start + 10])
            ]
            answer = self.sqs.send_message_batch(QueueUrl=self.dlq.url, Entries=entries)
            assert not answer.get("Failed")
        return list(bodies)

    def fill_numbered(self, count: int) -> list[str]:
        return self.fill(*(json.dumps({"n": n}) for n in range(count)))

    def take(self, queue: LocalQueue) -> list[dict[str, Any]]:
        """Receive and delete all visible messages of a queue, and return them."""
        found: list[dict[str, Any]] = []
        while batch := self.sqs.receive_message(
            QueueUrl=queue.url,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        ).get("Messages"):
            found += batch  # type: ignore[arg-type]
            for message in batch:
                self.sqs.delete_message(QueueUrl=queue.url, ReceiptHandle=message["ReceiptHandle"])
        return found

    def bodies(self, queue: LocalQueue) -> Counter[str]:
        """Receive and delete all visible messages of a queue, and count each body."""
        return Counter(message["Body"] for message in self.take(queue))


def ids_of(events: list[Any], kind: type[Any]) -> set[str]:
    return {id_ for event in events if isinstance(event, kind) for id_ in event.ids}


def task(name: str = "mails.send", **headers: Any) -> str:
    """Return the body of a Celery message."""
    return json.dumps(
        {
            "body": "W1tdLHt9LHt9XQ==",
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {"task": name, "id": str(uuid4()), **headers},
            "properties": {"body_encoding": "base64"},
        }
    )


def record(**facts: Any) -> Mapping[str, Any]:
    """Return message attributes with a dead-letter record that has these facts."""
    found = DeadLetterRecord(
        **{
            "task": "mails.send",
            "id": "42",
            "reason": "retry_for is over",
            "outcome": "RETRYABLE",
            "attempts": 7,
            "first_received_at": 1.0,
            "failed_at": 2.0,
            "origin": "arn:aws:sqs:us-east-1:000000000000:nowhere",
            "worker": "celery@host",
            **facts,
        }
    )
    return {ATTRIBUTE_NAME: {"DataType": "String", "StringValue": found.to_json()}}
