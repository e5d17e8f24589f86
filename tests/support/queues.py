"""Create queues with new names, in a way that works on every server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .differences import SHORT_POLL_MAY_FIND_NOTHING, differs
from .queue_names import queue_name

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue


def create_queue(sqs: SQSClient, stem: str = "test", **options: Any) -> LocalQueue:
    """Create a queue, by default with a dead-letter queue. Options: see ``create_local_queue``.

    On a server where a receive that does not wait can miss messages, each receive from these queues
    waits for a second by default.
    """
    # ``celery_sqs_backoff.testing`` is a plugin of pytest. pytest can rewrite its assertions only
    # if no other module has imported it before.
    from celery_sqs_backoff.testing import create_local_queue

    waits = {"ReceiveMessageWaitTimeSeconds": "1"} if differs(SHORT_POLL_MAY_FIND_NOTHING) else {}
    attributes = waits | options.pop("attributes", {})
    return create_local_queue(sqs, **{"name": queue_name(stem), "attributes": attributes} | options)
