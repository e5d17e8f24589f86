"""Facts about queues, tasks and settings, as plain values, so that rules need no SQS.

``None`` means that a fact is not known. A rule is silent about it then.
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

#: SQS's code for the URL of a queue that does not exist.
NO_SUCH_QUEUE = "NonExistentQueue"


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """One queue that the app consumes, and the dead-letter queue that its redrive policy names.

    Args:
        name: as in Celery.
        url: on SQS.
        attributes: as GetQueueAttributes returned them; ``None``: they could not be read.
        failure: why not: SQS's error code.
        dlq: the dead-letter queue, if there is one; its own ``dlq`` is never followed.
        denied: actions that SQS refused to this identity.
        is_consumed: whether workers of the app receive from it.
        client_region: where it was looked for, if it has no URL.
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
        """Region in the queue's URL, else the client's. ``None`` = not known."""
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
        """Policy as a mapping. Without a policy it is empty, which allows every source."""
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
        """Return an attribute as a number, or ``None`` if it is not known."""
        try:
            return int((self.attributes or {})[name])
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """One task of the app that is not Celery's own.

    Args:
        name: as registered.
        queue: where it goes unless its caller says otherwise: by the task, by task_routes, or
            because that is the default; ``None``: not known.
        also_to: queues that entries of ``beat_schedule`` name for it.
        exchange: that it is routed to instead of a queue.
        is_covered: whether its base class is ``SQSBackoffTask``.
        backoff: the delay policy; ``None`` without the base class.
        retry_for: seconds, ``None`` = no limit.
        max_retries: ``None`` = no limit.
        fifo_cap: the longest delay on a FIFO queue, in seconds.
        retried_errors: names of the exception classes that are RETRYABLE.
        needs_store: whether it needs a store, for a guard or workflows.
        wants_dlq: whether it dead-letters the messages that it gives up.
        acks_late: Celery's option.
        autoretries: whether Celery's own autoretry is on.
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
        """The same task on a FIFO queue, where its delays are shorter."""
        if self.backoff is None:
            return self
        return replace(self, backoff=tolerant(self.backoff, cap=self.fifo_cap))


@dataclass(frozen=True, kw_only=True)
class AppFacts:
    """The app's settings, as far as a rule asks for them."""

    tasks: tuple[TaskFacts, ...] = ()
    has_store: bool = False
    #: Why no worker can start with the store's settings; ``None``: it can.
    store_fault: str | None = None
    #: Why the store cannot be used; ``None``: it can be, or was not asked.
    store_failure: str | None = None
    #: Why others can write into the store; ``None``: they cannot, or it was not looked at.
    store_forgeable: str | None = None
    #: Why the store may drop records before their end; ``None`` = no sign of that.
    store_eviction: str | None = None
    default_queue: str = "celery"
    concurrency: int | None = None
    prefetch_multiplier: int = 4
    events: bool = False


@dataclass(frozen=True, kw_only=True)
class ProjectFacts:
    """All that was read."""

    app: AppFacts = field(default_factory=AppFacts)
    queues: tuple[QueueFacts, ...] = ()
    #: Whether ``queues`` are all that the app consumes, and not some that the operator has named.
    are_all: bool = False
    #: The broker, if it is not SQS: then no queue was looked at.
    other_broker: str | None = None

    @property
    def covered(self) -> list[TaskFacts]:
        return [task for task in self.app.tasks if task.is_covered]

    def sent_to(self, queue: QueueFacts) -> list[TaskFacts]:
        """Return the tasks that a queue is likely to have, without tasks of other queues.

        If all go elsewhere, callers must name this queue. Then it has the tasks without a route,
        or all of them if each has a route.
        """
        tasks = self.app.tasks
        found = [t for t in tasks if t.queue in (None, queue.name) or queue.name in t.also_to]
        unrouted = [task for task in tasks if task.queue == self.app.default_queue]
        return found or unrouted or list(tasks)

    @property
    def consumed(self) -> list[QueueFacts]:
        """The queues that could be read."""
        return [q for q in self.queues if q.is_consumed and q.attributes is not None]

    @property
    def unread(self) -> list[QueueFacts]:
        """Queues that exist, as far as is known, and could not be read, so that no rule asks them.

        A denied permission is one reason, and also a finding, which can be ignored.
        """
        return [q for q in self.queues if q.attributes is None and not q.is_missing]
