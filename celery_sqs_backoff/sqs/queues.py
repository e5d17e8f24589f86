"""Reads the attributes of a queue that matter for its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from celery.utils.log import get_logger

from .calls import Calls
from .errors import Failure, Kind
from .limits import DEFAULT_VISIBILITY_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

logger = get_logger(__name__)

#: Codes which mean that a permission is missing. This does not change by itself. The other codes of
#: ``Kind.DENIED`` that GetQueueAttributes returns are for refused signatures, where newer
#: credentials may help.
_FOR_GOOD = {"AccessDenied", "AccessDeniedException"}

#: A missing permission counts as final only if it is still missing after this time, because a
#: role's policy may be attached just after a worker with this role has started.
_REFUSAL_LASTS_SECONDS = 60.0


@dataclass(frozen=True)
class Queue:
    """The attributes of a queue that matter for its messages.

    ``None`` means that the queue has no such attribute, or that the attribute could not be read.
    """

    url: str
    #: Seconds for which a receive hides a message. If the queue's own value is 0, this is SQS's
    #: default, and the worker asks for it at each receive.
    visibility_timeout_seconds: int = DEFAULT_VISIBILITY_TIMEOUT_SECONDS
    retention_seconds: int | None = None
    max_receive_count: int | None = None
    arn: str | None = None
    dlq_arn: str | None = None
    #: False: the attributes could not be read yet, so a dead-letter queue may or may not exist.
    is_read: bool = True
    #: When SQS first refused the read for good. ``None``: SQS has not refused it, or the refusal
    #: has lasted for a minute and counts as final.
    refused_at: float | None = field(default=None, compare=False)
    #: Messages in flight when the queue was read, including hidden messages. 0: none, or not known.
    messages_in_flight: int = field(default=0, compare=False)
    #: All attributes, as GetQueueAttributes returned them. ``None``: they could not be read.
    attributes: Mapping[str, str] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def name(self) -> str:
        return queue_name(self.url)

    @property
    def is_fifo(self) -> bool:
        return self.url.endswith(".fifo")

    @cached_property
    def dlq_url(self) -> str | None:
        """URL of the dead-letter queue, or ``None`` if the queue has no dead-letter queue."""
        return None if self.dlq_arn is None else sibling_url(self.url, self.dlq_arn)


def read_redrive_policy(attributes: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the ARN of a queue's dead-letter queue and its ``maxReceiveCount``.

    Both are ``None`` if the queue has no redrive policy, or an invalid policy.
    """
    try:
        policy = json.loads(attributes.get("RedrivePolicy") or "{}")
        return str(policy["deadLetterTargetArn"]), int(policy["maxReceiveCount"])
    except (KeyError, TypeError, ValueError):
        return None, None


def sibling_url(url: str, arn: str) -> str:
    """Return the URL of the queue ``arn`` in the same account and Region as the queue at ``url``.

    A dead-letter queue must be in the account and Region of its source, so only the name differs.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
    return f"{url.rpartition('/')[0]}/{arn.rpartition(':')[2]}"


def queue_name(place: str) -> str:
    """Return the name that a queue has on SQS, from its URL, its ARN or the name itself."""
    return place.rpartition("/" if "://" in place else ":")[2]


def count_messages(attributes: Mapping[str, str]) -> tuple[int, int, int]:
    """Return SQS's approximate numbers of messages that are ready, in flight and delayed.

    A number that SQS did not return is 0.
    """
    ready, in_flight, delayed = (
        int(attributes.get(f"ApproximateNumberOfMessages{kind}", 0))
        for kind in ("", "NotVisible", "Delayed")
    )
    return ready, in_flight, delayed


def read_queue(
    client: SQSClient | Calls, url: str, *, now: float, last: Queue | None = None
) -> Queue:
    """Ask SQS for a queue's attributes (GetQueueAttributes).

    If the read fails, return the attributes of the last read that succeeded, with 0 messages in
    flight. If no read has succeeded:

    - If SQS has refused the read for a minute, because the permission is missing or the server does
      not know the call, return SQS's default visibility timeout and no dead-letter queue.
    - In other cases, for example if SQS is unreachable, return a queue with ``is_read=False``. The
      caller should read again soon.

    Each of these two cases is logged once.

    Arguments:
        client: a boto3 client, or a :class:`Calls`.
        url: the queue's URL.
        now: the time in seconds, by any clock.
        last: the queue as the last call returned it. ``None``: this is the first call.
    """
    calls = client if isinstance(client, Calls) else Calls(client, url)
    found = calls.attributes()
    if not isinstance(found, Failure):
        return describe_queue(url, found)
    for_good = found.code in _FOR_GOOD or found.kind is Kind.UNSUPPORTED
    if last is not None and (last.is_read or not for_good):
        return replace(last, messages_in_flight=0)
    if last is None:
        logger.warning("sqs_backoff.queue_not_read: %s: %s; reading it again soon", url, found)
    if not for_good:
        return Queue(url, is_read=False)
    refused_at = now if last is None or last.refused_at is None else last.refused_at
    if now - refused_at < _REFUSAL_LASTS_SECONDS:
        return Queue(url, is_read=False, refused_at=refused_at)
    logger.error(
        "sqs_backoff.queue_unreadable: %s: %s; assuming a visibility timeout of %d s and no"
        " dead-letter queue, so messages that are given up are deleted. The worker needs"
        " sqs:GetQueueAttributes on the queue.",
        url,
        found,
        DEFAULT_VISIBILITY_TIMEOUT_SECONDS,
    )
    return Queue(url)


def describe_queue(url: str, attributes: Mapping[str, str]) -> Queue:
    """Return a queue with the attributes that GetQueueAttributes returned."""
    retention = attributes.get("MessageRetentionPeriod")
    visibility = int(attributes.get("VisibilityTimeout", DEFAULT_VISIBILITY_TIMEOUT_SECONDS))
    arn, (dlq_arn, max_receive_count) = attributes.get("QueueArn"), read_redrive_policy(attributes)
    return Queue(
        url,
        visibility_timeout_seconds=visibility or DEFAULT_VISIBILITY_TIMEOUT_SECONDS,
        retention_seconds=None if retention is None else int(retention),
        max_receive_count=max_receive_count,
        arn=arn,
        dlq_arn=None if dlq_arn == arn else dlq_arn,  # a queue cannot be its own dead-letter queue
        messages_in_flight=count_messages(attributes)[1],
        attributes=attributes,
    )
