"""Make new names for queues. All names of one run begin alike, so that it can find its queues."""

from __future__ import annotations

from typing import Final
from uuid import uuid4

#: The beginning of the names of all queues that this run makes. Other runs use the same account.
QUEUE_NAME_PREFIX: Final = f"celery-sqs-backoff-test-{uuid4().hex[:8]}-"


def queue_name(stem: str = "test") -> str:
    """Return a new name that SQS allows.

    ``stem`` has at most 29 characters, because SQS allows 80 and ``-dlq.fifo`` may follow the name.
    """
    return f"{QUEUE_NAME_PREFIX}{stem}-{uuid4().hex[:8]}"
