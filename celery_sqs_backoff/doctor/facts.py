"""Facts about queues, tasks and settings, as plain values. Rules use them and never call SQS.

``None`` means that a fact is not known. A rule reports no fault that depends on an unknown fact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from ..retry.budget import tolerant
from ..retry.policies import Policy
from ..sqs.arns import region_of
from ..sqs.find_queue import NOT_CREATED, NOT_PREDEFINED
from ..sqs.queues import read_redrive_policy

#: SQS's error code for a queue that does not exist.
NO_SUCH_QUEUE = "NonExistentQueue"


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """One queue that the app consumes, or the dead-letter queue of such a queue.

    Args:
        name: name of the queue in Celery.
        url: URL of the queue on SQS.
        attributes: the queue's attributes from GetQueueAttributes; ``None`` = they could not be
            read.
        failure: SQS's error code if the attributes could not be read; ``NOT_CREATED`` or
            ``NOT_PREDEFINED`` if kombu knows no URL of the queue; else ``None``.
        dlq: facts about the dead-letter queue; ``None`` = the queue has no dead-letter queue, or is
            a dead-letter queue itself.
        denied: actions that SQS denied to the identity that ran the doctor.
        is_consumed: whether workers of the app receive from the queue.
        client_region: Region in which the doctor looked for a queue that it did not find; else
            ``None``.
    """

    name: str
    url: str
    attributes: Mapping[str, str] | None
    failure: str | None = None
    dlq: QueueFacts | None = None
    denied: tuple[str, ...] = ()
    is_consumed: bool = True
    client_region: str | None = None

    @property
    def is_missing(self) -> bool:
        return self.failure in (NO_SUCH_QUEUE, NOT_CREATED, NOT_PREDEFINED)

    @property
    def region(self) -> str | None:
        """Region in the queue's URL, or the client's Region. ``None`` = not known."""
        return region_of(urlsplit(self.url).hostname or "") or self.client_region

    @property
    def arn(self) -> str | None:
        return self._text("QueueArn")

    @property
    def is_fifo(self) -> bool:
        return self.url.endswith(".fifo")

    @property
    def retention_seconds(self) -> int | None:
        return self.number("MessageRetentionPeriod")

    @property
    def visible(self) -> int | None:
        return self.number("ApproximateNumberOfMessages")

    @property
    def redrive_allow_policy(self) -> dict[str, Any]:
        """RedriveAllowPolicy as a mapping. Empty = all queues may use this dead-letter queue."""
        try:
            found = json.loads((self.attributes or {}).get("RedriveAllowPolicy") or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def max_receive_count(self) -> int | None:
        return read_redrive_policy(self.attributes or {})[1]

    @property
    def dlq_arn(self) -> str | None:
        return read_redrive_policy(self.attributes or {})[0]

    def _text(self, name: str) -> str | None:
        value = (self.attributes or {}).get(name)
        return value or None

    def number(self, name: str) -> int | None:
        """Return an attribute as a number. ``None`` = not known."""
        try:
            return int((self.attributes or {})[name])
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """One task of the app that is not Celery's own.

    Args:
        name: name under which the task is registered.
        queue: queue to which Celery sends the task if its caller names no queue. The task,
            ``task_routes`` or ``task_default_queue`` names this queue. ``None`` = not known.
        also_to: queues that entries of ``beat_schedule`` name for the task.
        exchange: exchange in the task's route, if the route names no queue; else ``None``.
        is_covered: whether the task has the base class ``SQSBackoffTask``.
        backoff: the delay policy; ``None`` without the base class.
        retry_for: seconds; ``None`` = no limit.
        max_retries: ``None`` = no limit.
        fifo_cap: the longest delay on a FIFO queue, in seconds.
        retried_errors: names of the exception classes in ``retry_on``.
        needs_store: whether the task needs a store, because it has a guard or workflows.
        wants_dlq: whether the task's messages go to the dead-letter queue if they are given up.
        acks_late: Celery's option ``acks_late``.
        autoretries: whether Celery's own ``autoretry_for`` is on.
    """

    name: str
    is_covered: bool
    queue: str | None = None
    also_to: tuple[str, ...] = ()
    exchange: str | None = None
    backoff: Policy | None = None
    retry_for: float | None = None
    max_retries: int | None = None
    fifo_cap: float = math.inf
    retried_errors: tuple[str, ...] = ()
    needs_store: bool = False
    wants_dlq: bool = True
    acks_late: bool = True
    autoretries: bool = False

    @cached_property
    def on_fifo(self) -> TaskFacts:
        """The same task with its delays scaled down to ``fifo_cap``, as on a FIFO queue."""
        if self.backoff is None:
            return self
        return replace(self, backoff=tolerant(self.backoff, cap=self.fifo_cap))


@dataclass(frozen=True, kw_only=True)
class AppFacts:
    """The settings of the app that rules use."""

    tasks: tuple[TaskFacts, ...] = ()
    has_store: bool = False
    #: Why no worker can start with the store's settings; ``None`` = workers can start.
    store_fault: str | None = None
    #: Why the store cannot be used; ``None`` = it can be used, or the doctor did not ask it.
    store_failure: str | None = None
    #: Why other users of the store can forge records; ``None`` = other users cannot, or the doctor
    #: did not check this.
    store_forgeable: str | None = None
    #: Why the store may drop records before they expire; ``None`` = no such setting was found.
    store_eviction: str | None = None
    default_queue: str = "celery"
    events: bool = False


@dataclass(frozen=True, kw_only=True)
class ProjectFacts:
    """All facts about a project: its queues, tasks and settings."""

    app: AppFacts = field(default_factory=AppFacts)
    queues: tuple[QueueFacts, ...] = ()
    #: Whether ``queues`` has all queues of the app. False if the operator has named some (``-Q``).
    are_all: bool = False
    #: Name of the broker if it is not SQS. Then no queue was read. ``None`` = SQS.
    other_broker: str | None = None

    @property
    def covered(self) -> list[TaskFacts]:
        return [task for task in self.app.tasks if task.is_covered]

    def sent_to(self, queue: QueueFacts) -> list[TaskFacts]:
        """Return the tasks that are probably sent to a queue.

        Return the tasks with this queue in their settings, and the tasks with an unknown queue. If
        no task is found, return the tasks of the default queue, because their callers may name this
        queue. If no task is found again, return all tasks.
        """
        tasks = self.app.tasks
        found = [t for t in tasks if t.queue in (None, queue.name) or queue.name in t.also_to]
        unrouted = [task for task in tasks if task.queue == self.app.default_queue]
        return found or unrouted or list(tasks)

    @property
    def consumed(self) -> list[QueueFacts]:
        """Queues that workers receive from and that could be read."""
        return [q for q in self.queues if q.is_consumed and q.attributes is not None]

    @property
    def unread(self) -> list[QueueFacts]:
        """Queues that could not be read, except queues that do not exist.

        Most rules do not check these queues. A missing permission is a finding, but the operator
        may ignore that finding. So callers must report these queues, too.
        """
        return [q for q in self.queues if q.attributes is None and not q.is_missing]
