"""What a queue says of itself, and a client that settles messages on it without hanging."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from celery.utils.log import get_logger

from .limits import DEFAULT_VISIBILITY_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

__all__ = ["Queue", "error_code", "read_queue", "settling_client"]

logger = get_logger(__name__)

#: botocore waits 60 s and tries five times by default: too long for a thread on whose next call
#: other leases depend. Trying again is the keeper's business.
_SETTLING_CONFIG = Config(
    connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}, tcp_keepalive=True
)


#: Errors that asking again does not help against.
_FOR_GOOD = {"AccessDenied", "AccessDeniedException", "UnsupportedOperation", "ValueError"}


@dataclass(frozen=True)
class Queue:
    """A queue's attributes, as far as they decide what becomes of a message.

    ``None`` means that the queue has no such attribute, or that it could not be read.
    """

    url: str
    visibility_timeout_seconds: int = DEFAULT_VISIBILITY_TIMEOUT_SECONDS
    retention_seconds: int | None = None
    max_receive_count: int | None = None
    arn: str | None = None
    dlq_arn: str | None = None
    #: False: SQS could not be asked, so that nobody knows yet whether there is a dead-letter queue.
    is_read: bool = True

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def is_fifo(self) -> bool:
        return self.url.endswith(".fifo")

    @property
    def dlq_url(self) -> str | None:
        """The dead-letter queue's URL: SQS wants it in the same account and Region, so only the
        name differs. https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
        """
        if self.dlq_arn is None:
            return None
        return f"{self.url.rpartition('/')[0]}/{self.dlq_arn.rpartition(':')[2]}"


def read_queue(client: SQSClient, url: str) -> Queue:
    """Ask SQS for a queue's attributes (GetQueueAttributes).

    A queue that may not be read is logged and treated as one with SQS's default visibility timeout
    and no dead-letter queue. One that cannot be read now (unreachable, expired credentials) is
    returned with ``is_read=False``, to be asked for again.
    """
    try:
        answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        return _from_attributes(url, dict(answer["Attributes"]))
    except (ClientError, BotoCoreError, KeyError, ValueError) as exc:
        if error_code(exc) not in _FOR_GOOD:
            logger.warning("Cannot read the attributes of %s now (%s)", url, error_code(exc))
            return Queue(url, is_read=False)
        logger.error(
            "Cannot read the attributes of %s (%s): taking its visibility timeout for %d s and its"
            " dead-letter queue for none. The worker needs sqs:GetQueueAttributes on the queue.",
            url,
            error_code(exc),
            DEFAULT_VISIBILITY_TIMEOUT_SECONDS,
        )
        return Queue(url)


def _from_attributes(url: str, attributes: Mapping[Any, str]) -> Queue:
    redrive = json.loads(attributes.get("RedrivePolicy") or "{}")
    retention = attributes.get("MessageRetentionPeriod")
    return Queue(
        url,
        visibility_timeout_seconds=int(
            attributes.get("VisibilityTimeout", DEFAULT_VISIBILITY_TIMEOUT_SECONDS)
        ),
        retention_seconds=None if retention is None else int(retention),
        max_receive_count=int(redrive["maxReceiveCount"]) if redrive else None,
        arn=attributes.get("QueueArn"),
        dlq_arn=redrive.get("deadLetterTargetArn"),
    )


def settling_client(client: Any) -> SQSClient:
    """Copy kombu's client, credentials included, with short timeouts and no retries of its own."""
    credentials = client._request_signer._credentials  # kombu copies its clients the same way
    session = boto3.Session()
    vars(session._session)["_credentials"] = credentials  # shared, so that they refresh
    copy: SQSClient = session.client(
        "sqs",
        region_name=client.meta.region_name,
        endpoint_url=client.meta.endpoint_url,
        config=client.meta.config.merge(_SETTLING_CONFIG),
    )
    return copy


def error_code(exc: BaseException) -> str:
    """Name an error of a call to SQS: its code without the namespace, else the exception's type."""
    if isinstance(exc, ClientError):
        return str(exc.response.get("Error", {}).get("Code", "Unknown")).rpartition(".")[2]
    return type(exc).__name__
