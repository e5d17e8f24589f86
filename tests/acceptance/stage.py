"""One queue or more, real workers on them, and what a test wants to know of both afterwards.

A test module in this folder is also the Celery app of its workers (``celery -A`` imports it): the
tasks stand beside the tests. What differs from run to run comes through the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery

from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from celery_sqs_backoff.testing import LocalQueue, local_sqs_settings
from tests.support.processes import eventually
from tests.support.queues import create_queue
from tests.support.record import Record
from tests.support.redis_database import redis_url
from tests.support.workers import Worker, worker

if TYPE_CHECKING:
    from celery.result import AsyncResult
    from mypy_boto3_sqs.client import SQSClient

    from tests.support.fault_proxy import FaultProxy

__all__ = ["RECORDED", "REDIS", "DeadLetter", "Stage", "app_of_this_module"]

#: A result backend that worker and test both see.
REDIS = redis_url()

#: The calls whose requests the proxy keeps for the test.
RECORDED = (
    "ChangeMessageVisibility",
    "ChangeMessageVisibilityBatch",
    "DeleteMessage",
    "DeleteMessageBatch",
    "SendMessage",
    "SendMessageBatch",
)

_SETTINGS_VARIABLE = "TEST_APP_SETTINGS"


class _AppWithTasksOfItsOwn(Celery):  # type: ignore[misc]
    """Celery defines the tasks of an app on all later apps too: those of other test modules."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **({"shared": False} | options))


def app_of_this_module() -> Celery:
    """In a worker: an app on the stage that has started it. In the test: one to define tasks on."""
    app = _AppWithTasksOfItsOwn("acceptance", set_as_current=False)
    app.conf.update(json.loads(os.environ.get(_SETTINGS_VARIABLE, "{}")))
    return app


@dataclass(frozen=True)
class DeadLetter:
    """A message of a dead-letter queue; ``record`` is what we have written on it."""

    message_id: str
    body: str
    record: dict[str, Any] | None


class Stage:
    """Queues with an app that sends to them from here, and workers that consume them."""

    def __init__(
        self,
        *,
        module: str,
        sqs: SQSClient,
        endpoint: str,
        queues: tuple[LocalQueue, ...],
        record: Record,
        proxy: FaultProxy | None = None,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.sqs = sqs
        self.proxy = proxy
        self.queues = queues
        self.record = record
        self._module = module
        self.worker_settings = _settings(proxy.endpoint if proxy else endpoint, queues, conf)
        # Not through the proxy: what is counted there is the worker's alone.
        self.app = Celery("acceptance", set_as_current=False)
        self.app.conf.update(_settings(endpoint, queues, conf))

    # Doing

    @contextmanager
    def worker(self, *, conf: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Worker]:
        """A worker on all queues; its log is printed when the block fails.

        ``conf`` is the worker's alone; ``options`` are those of ``tests.support.workers.worker``.
        """
        settings = self.worker_settings | dict(conf or {})
        env = self.record.env | {_SETTINGS_VARIABLE: json.dumps(settings)}
        log_file = self.record.path.with_name(f"worker-{uuid4().hex[:8]}.log")
        options = {"queues": [q.name for q in self.queues], "log_file": log_file} | options
        options["env"] = env | options.get("env", {})
        try:
            with worker(self._module, **options) as running:
                yield running
        except BaseException:
            self._show(log_file)
            raise

    def send(self, task: str, *args: Any, queue: LocalQueue | None = None, **options: Any) -> Any:
        """Send a task, by name, with positional arguments; ``options`` as for ``send_task``."""
        result: AsyncResult[Any] = self.app.send_task(
            task, args, queue=(queue or self.queues[0]).name, **options
        )
        return result

    # Looking

    def runs(self, task: str) -> list[dict[str, Any]]:
        """What :func:`tests.support.record.note` was given by a task, oldest first."""
        return self.record.entries(task=task)

    def asked(self, action: str) -> list[dict[str, Any]]:
        """The entries of all batch calls of an action; the requests of one without entries."""
        assert self.proxy is not None
        found: list[dict[str, Any]] = []
        for request in self.proxy.requests(action):
            found += request.get("Entries", [request])
        return found

    def delays_asked(self) -> list[int]:
        """All visibility timeouts that the worker has asked for, in order; 0 = given back."""
        return [entry["VisibilityTimeout"] for entry in self.asked("ChangeMessageVisibilityBatch")]

    def messages(self, queue: LocalQueue | None = None) -> tuple[int, int]:
        """How many messages of a queue are visible, and how many are hidden."""
        answer = self.sqs.get_queue_attributes(
            QueueUrl=(queue or self.queues[0]).url, AttributeNames=["All"]
        )
        found = answer["Attributes"]
        return (
            int(found["ApproximateNumberOfMessages"]),
            int(found["ApproximateNumberOfMessagesNotVisible"]),
        )

    def wait_until_settled(self, *, timeout: float = 60.0) -> None:
        """Until the queues are empty: every message is deleted, or in a dead-letter queue.

        Seen three times, for the numbers are approximate: a message that has just become visible
        may be missing from both.
        """
        eventually(
            lambda: all(self.messages(queue) == (0, 0) for queue in self.queues * 3),
            timeout=timeout,
            message=lambda: f"left, visible and hidden: {[self.messages(q) for q in self.queues]}",
        )

    def dead_letters(self, queue: LocalQueue | None = None) -> list[DeadLetter]:
        """All messages of the queue's dead-letter queue; they stay there, hidden."""
        dlq = (queue or self.queues[0]).dlq
        assert dlq is not None
        found: list[DeadLetter] = []
        while batch := self.sqs.receive_message(
            QueueUrl=dlq.url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for message in batch:
                attribute = message.get("MessageAttributes", {}).get(ATTRIBUTE_NAME)
                record = json.loads(attribute["StringValue"]) if attribute else None
                found.append(DeadLetter(message["MessageId"], message["Body"], record))
        return found

    @staticmethod
    def _show(log_file: Path) -> None:
        if log_file.exists():
            print(f"--- {log_file.name}\n{log_file.read_text(errors='replace')}")  # noqa: T201


@contextmanager
def stage(
    *,
    module: str,
    sqs: SQSClient,
    endpoint: str,
    directory: Path,
    proxy: FaultProxy | None = None,
    queues: Mapping[str, Mapping[str, Any]] | None = None,
    conf: Mapping[str, Any] | None = None,
) -> Iterator[Stage]:
    """Make queues (name stem to options of ``create_local_queue``), delete them afterwards."""
    made = tuple(
        create_queue(sqs, stem, **options) for stem, options in (queues or {"test": {}}).items()
    )
    if proxy is not None:
        proxy.record(*RECORDED)
    try:
        yield Stage(
            module=module,
            sqs=sqs,
            endpoint=endpoint,
            queues=made,
            record=Record(directory / "record"),
            proxy=proxy,
            conf=conf,
        )
    finally:
        for queue in made:
            sqs.delete_queue(QueueUrl=queue.url)
            if queue.dlq is not None:
                sqs.delete_queue(QueueUrl=queue.dlq.url)


def _settings(
    endpoint: str, queues: tuple[LocalQueue, ...], conf: Mapping[str, Any] | None
) -> dict[str, Any]:
    settings = local_sqs_settings(endpoint, *queues)
    # Users poll long; and it makes the calls few enough to count.
    settings["broker_transport_options"] |= {"wait_time_seconds": 2, "polling_interval": 1}
    del settings["worker_hijack_root_logger"], settings["worker_redirect_stdouts"]
    settings["result_backend"] = None
    return settings | dict(conf or {})
