"""Makes new names for queues, by which the queues of one run can be found."""

from __future__ import annotations

from typing import Final
from uuid import uuid4

#: Of all queues that this run makes where others have theirs too.
QUEUE_NAME_PREFIX: Final = f"celery-sqs-backoff-test-{uuid4().hex[:8]}-"


def queue_name(stem: str = "test") -> str:
    """Return a name that is legal for SQS and never given twice.

    SQS's 80 characters leave 29 for ``stem``, when ``-dlq.fifo`` comes behind the name.
    """
    return f"{QUEUE_NAME_PREFIX}{stem}-{uuid4().hex[:8]}"
