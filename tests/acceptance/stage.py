"""Make queues, run real workers on them, and read afterwards what happened to the messages.

A test module in this folder is also the Celery app of its workers (``celery -A`` imports it), so
the tasks stand beside the tests. A test passes settings to its workers through the environment.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery

from celery_sqs_backoff.testing import LocalQueue, local_sqs_settings
from tests.support.processes import eventually
from tests.support.queues import create_queue
from tests.support.record import Record
from tests.support.redis_database import redis_url
from tests.support.workers import Worker, worker

if TYPE_CHECKING:
    from celery.result import AsyncResult
    from mypy_boto3_sqs.client import SQSClient

    from tests.support.fault_proxy import Fault, FaultProxy

#: The message attribute that says why the worker gave a message up. See docs/dead-letters.md.
ATTRIBUTE_NAME = "celery-sqs-backoff"

#: Options for a worker that the test kills at the end of the block, instead of stopping it.
KILLED: Mapping[str, Any] = {"stop_timeout": 0}

#: The result backend. The workers write results to it, and the test reads them.
REDIS = redis_url()

#: The SQS calls whose requests the fault proxy records for the test.
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
    """An app that keeps its tasks to itself.

    By default, Celery also registers the tasks of one app on all apps that are made later. Here
    these are the apps of other test modules.
    """

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **({"shared": False} | options))


def app_of_this_module() -> Celery:
    """Make the Celery app of a test module.

    In a worker process, it gets its settings from the environment that the test has set. In the
    test's own process it has no settings, and serves only to define the tasks.
    """
    app = _AppWithTasksOfItsOwn("acceptance", set_as_current=False)
    app.conf.update(json.loads(os.environ.get(_SETTINGS_VARIABLE, "{}")))
    return app


@dataclass(frozen=True)
class DeadLetter:
    """A message on a dead-letter queue.

    ``record`` is the worker's note of why it gave the message up, or None if there is no note.
    """

    message_id: str
    body: str
    record: dict[str, Any] | None


class Stage:
    """Queues, an app with which the test sends tasks to them, and workers that consume them."""

    def __init__(
        self,
        *,
        module: str,
        sqs: SQSClient,
        endpoint: str,
        queues: Mapping[str, LocalQueue],
        record: Record,
        proxy: FaultProxy | None = None,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.sqs = sqs
        self.proxy = proxy
        self.queues = tuple(queues.values())
        self._named = queues
        self.record = record
        self._module = module
        self.worker_settings = _settings(proxy.endpoint if proxy else endpoint, self.queues, conf)
        # The test itself does not use the proxy, so the proxy counts only the workers' calls.
        self.app = Celery("acceptance", set_as_current=False)
        self.app.conf.update(_settings(endpoint, self.queues, conf))

    # Start workers, and send messages

    @contextmanager
    def worker(self, *, conf: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Worker]:
        """Run a worker on all queues. If the ``with`` block fails, print the worker's log.

        ``conf`` has settings for this worker only. ``options`` are those of
        ``tests.support.workers.worker``.
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

    @contextmanager
    def workers(self, **options: Mapping[str, Any]) -> Iterator[dict[str, Worker]]:
        """Run several workers that start and stop at the same time, each with its own options."""
        with ExitStack() as stack, ThreadPoolExecutor(len(options)) as threads:
            starting = {
                name: threads.submit(stack.enter_context, self.worker(**own))
                for name, own in options.items()
            }
            running = {name: start.result() for name, start in starting.items()}
            try:
                yield running
            finally:
                for each in running.values():
                    if each.is_running:
                        each.send(signal.SIGTERM)

    def send(
        self, task: str, *args: Any, queue: LocalQueue | str | None = None, **options: Any
    ) -> Any:
        """Send a task by name with positional arguments. ``options`` are those of ``send_task``."""
        result: AsyncResult[Any] = self.app.send_task(
            task, args, queue=self._queue(queue).name, **options
        )
        return result

    def send_bodies(self, *bodies: str, queue: LocalQueue | str | None = None) -> list[str]:
        """Send messages with these texts as bodies, and return the message IDs."""
        found: list[str] = []
        for first in range(0, len(bodies), 10):
            sent = self.sqs.send_message_batch(
                QueueUrl=self._queue(queue).url,
                Entries=[
                    {"Id": str(n), "MessageBody": body}
                    for n, body in enumerate(bodies[first : first + 10])
                ],
            )
            assert not sent.get("Failed")
            found += [entry["MessageId"] for entry in sent["Successful"]]
        return found

    def fail(self, queue: LocalQueue | str, *faults: Fault) -> None:
        """Make the workers' calls about one queue fail with these faults, until :meth:`heal`."""
        assert self.proxy is not None
        self.proxy.inject(*(replace(fault, queue=self._queue(queue).url) for fault in faults))

    def heal(self, queue: LocalQueue | str) -> None:
        """End the faults of :meth:`fail` for this queue."""
        assert self.proxy is not None
        self.proxy.heal(self._queue(queue).url)

    # Read what happened

    def __getitem__(self, stem: str) -> LocalQueue:
        """Return the queue that has this name in ``stage(queues=...)``."""
        return self._named[stem]

    def _queue(self, which: LocalQueue | str | None) -> LocalQueue:
        if which is None:
            return self.queues[0]
        return self[which] if isinstance(which, str) else which

    def runs(self, task: str) -> list[dict[str, Any]]:
        """Return what a task has noted with :func:`tests.support.record.note`, oldest first."""
        return self.record.entries(task=task)

    def asked(self, action: str, queue: LocalQueue | str | None = None) -> list[dict[str, Any]]:
        """Return the entries of the workers' batch calls, about all queues or about one.

        ``action`` is the name of the SQS call. If it is no batch call, return the requests.
        """
        assert self.proxy is not None
        found: list[dict[str, Any]] = []
        for request in self.proxy.requests(action):
            asked_of = request["QueueUrl"].rpartition("/")[2]
            if queue is None or asked_of == self._queue(queue).url.rpartition("/")[2]:
                found += request.get("Entries", [request])
        return found

    def delays_asked(self, queue: LocalQueue | str | None = None) -> list[int]:
        """Return the visibility timeouts that the workers have set, oldest first.

        A timeout of 0 gives a message back to the queue.
        """
        entries = self.asked("ChangeMessageVisibilityBatch", queue)
        return [entry["VisibilityTimeout"] for entry in entries]

    def messages(self, queue: LocalQueue | str | None = None) -> tuple[int, int]:
        """Return how many messages of a queue are visible, and how many are hidden."""
        answer = self.sqs.get_queue_attributes(
            QueueUrl=self._queue(queue).url, AttributeNames=["All"]
        )
        found = answer["Attributes"]
        return (
            int(found["ApproximateNumberOfMessages"]),
            int(found["ApproximateNumberOfMessagesNotVisible"]),
        )

    def wait_until_settled(self, *queues: LocalQueue | str, timeout: float = 90.0) -> None:
        """Wait until these queues are empty, or all queues if none is given.

        Each message is then deleted or on a dead-letter queue. The queues must look empty three
        times, because SQS counts only approximately: a message that has just become visible may
        be counted neither as visible nor as hidden.
        """
        wanted = queues or self.queues
        eventually(
            lambda: all(self.messages(queue) == (0, 0) for queue in wanted * 3),
            timeout=timeout,
            message=lambda: f"{[(self._queue(q).name, self.messages(q)) for q in wanted]}",
        )

    def dead_letters(self, queue: LocalQueue | str | None = None) -> list[DeadLetter]:
        """Return all messages of the queue's dead-letter queue. They stay there, but hidden."""
        dlq = self._queue(queue).dlq
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
    """Make queues, yield a stage that has them, and delete them afterwards.

    ``queues`` maps the beginning of each queue's name to options of ``create_local_queue``.
    ``conf`` has settings for the app of the test and of all workers.
    """
    made = {
        stem: create_queue(sqs, stem, **options)
        for stem, options in (queues or {"test": {}}).items()
    }
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
        for queue in made.values():
            sqs.delete_queue(QueueUrl=queue.url)
            if queue.dlq is not None:
                sqs.delete_queue(QueueUrl=queue.dlq.url)


def _settings(
    endpoint: str, queues: tuple[LocalQueue, ...], conf: Mapping[str, Any] | None
) -> dict[str, Any]:
    settings = local_sqs_settings(endpoint, *queues)
    # Use long polls, as users do. Tests count calls, and short polls would make too many.
    settings["broker_transport_options"] |= {"wait_time_seconds": 2, "polling_interval": 1}
    del settings["worker_hijack_root_logger"], settings["worker_redirect_stdouts"]
    settings["result_backend"] = None
    return settings | dict(conf or {})
