"""Make new names for queues. All names of a run begin alike, so that the run can find them."""

from __future__ import annotations

from typing import Final
from uuid import uuid4

#: The names of all queues of this run begin with this text. On AWS, other runs may use the same
#: account.
QUEUE_NAME_PREFIX: Final = f"celery-sqs-backoff-test-{uuid4().hex[:8]}-"


def queue_name(stem: str = "test") -> str:
    """Return a new name that SQS allows.

    ``stem`` has at most 29 characters, because SQS allows 80 and ``-dlq.fifo`` may follow the name.
    """
    return f"{QUEUE_NAME_PREFIX}{stem}-{uuid4().hex[:8]}"
