"""Queues of tests, on whichever server: with names of their own, and read whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .differences import SHORT_POLL_MAY_FIND_NOTHING, differs
from .queue_names import queue_name

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue


def create_queue(sqs: SQSClient, stem: str = "test", **options: Any) -> LocalQueue:
    """Create a queue with a dead-letter queue, with the options of ``create_local_queue``.

    Where a receive that does not wait may miss messages, both queues wait for a second by default.
    """
    from celery_sqs_backoff.testing import create_local_queue  # after pytest, which rewrites it

    waits = {"ReceiveMessageWaitTimeSeconds": "1"} if differs(SHORT_POLL_MAY_FIND_NOTHING) else {}
    attributes = waits | options.pop("attributes", {})
    return create_local_queue(sqs, **{"name": queue_name(stem), "attributes": attributes} | options)
