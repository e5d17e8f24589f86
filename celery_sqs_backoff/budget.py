"""How long a message may go on being retried, and how long it may be hidden this time."""

from __future__ import annotations

import math
from enum import Enum

from .delivery import Delivery
from .limits import MAX_VISIBILITY_TIMEOUT_SECONDS, MAX_WAIT_TIME_SECONDS

__all__ = ["GiveUpReason", "longest_delay", "spent", "wire_delay"]

#: SQS counts the 12 hours from the *request* for the message, which a long poll may have made
#: MAX_WAIT_TIME_SECONDS before the worker saw the answer; the rest is for clocks and slow calls.
_TWELVE_HOURS_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 40

#: A message that is hidden until retention deletes it is lost; come back this much earlier.
_RETENTION_MARGIN_SECONDS = 300


class GiveUpReason(str, Enum):
    """Why a message is retried no more. The value is what the dead-letter record says."""

    NOT_RETRYABLE = "not retryable"
    MAX_RETRIES = "max_retries reached"
    RETRY_FOR = "retry_for is over"
    MAX_RECEIVE_COUNT = "the queue's maxReceiveCount is reached"
    RETENTION = "the queue's retention period is nearly over"
    WORKER_LOST = "worker lost"
    TIME_LIMIT = "hard time limit"
    REJECTED = "rejected by the task"
    NOT_UNDERSTOOD = "not understood"


def spent(
    delivery: Delivery,
    *,
    retries: int,
    max_retries: int | None,
    retry_for: float | None,
    now: float,
) -> GiveUpReason | None:
    """Say which budget leaves no further retry, or ``None`` if all do.

    Arguments:
        delivery: the receive that has just failed.
        retries: retries before this run (0 at the first run).
        max_retries: most retries; ``None`` = no limit.
        retry_for: seconds since SQS first handed the message out; ``None`` = no limit.
        now: seconds since the epoch.
    """
    if max_retries is not None and retries >= max_retries:
        return GiveUpReason.MAX_RETRIES
    if retry_for is not None and now - _first_received_at(delivery) >= retry_for:
        return GiveUpReason.RETRY_FOR
    if delivery.is_last_before_sqs_moves_it:
        return GiveUpReason.MAX_RECEIVE_COUNT
    if delivery.expires_at is not None and delivery.expires_at - now <= _RETENTION_MARGIN_SECONDS:
        return GiveUpReason.RETENTION
    return None


def longest_delay(delivery: Delivery, *, now: float) -> int:
    """Most seconds, at least 1, that the message may be hidden from ``now`` on.

    What is left of SQS's 12 hours since the receive, and of the queue's retention period.
    """
    longest = (
        MAX_VISIBILITY_TIMEOUT_SECONDS
        - _TWELVE_HOURS_MARGIN_SECONDS
        - max(0.0, now - delivery.received_at)
    )
    if delivery.expires_at is not None:
        longest = min(longest, delivery.expires_at - _RETENTION_MARGIN_SECONDS - now)
    return max(1, math.floor(longest))


def wire_delay(delay: float, delivery: Delivery, *, now: float) -> int:
    """Turn a drawn delay into what SQS is asked for: whole seconds, at least 1, and allowed.

    Rounds up, so that a draw spread over (0, n] is spread evenly over 1..n.
    """
    longest = longest_delay(delivery, now=now)
    return longest if delay >= longest else max(1, math.ceil(delay))


def _first_received_at(delivery: Delivery) -> float:
    if delivery.first_received_at is None:
        return delivery.received_at
    return delivery.first_received_at
