"""A task that is not due yet waits on SQS, not in a worker's memory.

At publishing, a countdown is SQS's own DelaySeconds as far as that goes (900 s, standard queues):
it costs no receive, and the message is not in flight. The rest when a worker receives the
message is a visibility timeout, which costs a receive for every 12 hours.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Final

from .limits import MAX_DELAY_SECONDS, MAX_VISIBILITY_TIMEOUT_SECONDS

#: A deferral is this long at the most; the rest of SQS's 12 hours is for clocks and slow calls.
_HOP_SECONDS: Final = MAX_VISIBILITY_TIMEOUT_SECONDS - 60


def delay_seconds(seconds: float) -> int:
    """Return the DelaySeconds, 0 to 900, for publishing a task that is due in ``seconds``."""
    return max(0, min(MAX_DELAY_SECONDS, math.floor(seconds)))


def parse_eta(header: object) -> float | None:
    """Read the ``eta`` header (ISO 8601, by default UTC) as seconds since the epoch.

    ``None`` if it is missing or not a time; Celery reports the latter.
    """
    if not isinstance(header, str):
        return None
    try:
        eta = datetime.fromisoformat(header.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).timestamp()


def deferrals(
    eta: float,
    *,
    sent_at: float | None,
    held_seconds: float,
    first_received_at: float | None = None,
) -> int:
    """Return how many receives a message has spent on waiting for its ETA.

    They are not attempts, and must not count as retries.

    Arguments:
        eta: when the task is due, seconds since the epoch.
        sent_at: when SQS got the message.
        held_seconds: a worker waits for this long rather than give the message back.
        first_received_at: when the waiting began. ``None``: not known; then SQS is taken to have
            delayed the message for as long as it can, which it does not on a FIFO queue, nor for a
            sender that did not ask.
    """
    if first_received_at is None:
        if sent_at is None:
            return 0
        first_received_at = sent_at + MAX_DELAY_SECONDS
    return max(0, math.ceil((eta - first_received_at - held_seconds) / _HOP_SECONDS))
