"""How long a message may go on being retried, and how long it may be hidden this time."""

from __future__ import annotations

import math
from enum import Enum
from random import Random

from .delivery import Delivery
from .limits import (
    MAX_MAX_RECEIVE_COUNT,
    MAX_VISIBILITY_TIMEOUT_SECONDS,
    MAX_WAIT_TIME_SECONDS,
)
from .policies import Policy

__all__ = [
    "GiveUpReason",
    "capped",
    "longest_delay",
    "receives_needed",
    "spent",
    "spent_before_run",
    "wire_delay",
]

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
    PARKED = "parked"
    NOT_UNDERSTOOD = "not understood"


def spent(
    delivery: Delivery,
    *,
    retries: int,
    max_retries: int | None,
    retry_for: float | None,
    delay: float,
    now: float,
) -> GiveUpReason | None:
    """Say which budget leaves no further retry, or ``None`` if all do.

    Arguments:
        delivery: the receive that has just failed.
        retries: retries before this run (0 at the first run).
        max_retries: most retries; ``None`` = no limit.
        retry_for: seconds since SQS first handed the message out; ``None`` = no limit. A retry that
            would begin after that is not waited for: it would not be run.
        delay: seconds until the retry would begin.
        now: seconds since the epoch.
    """
    if max_retries is not None and retries >= max_retries:
        return GiveUpReason.MAX_RETRIES
    if retry_for is not None and now + delay - _first_received_at(delivery) >= retry_for:
        return GiveUpReason.RETRY_FOR
    if delivery.is_last_before_sqs_moves_it:
        return GiveUpReason.MAX_RECEIVE_COUNT
    if delivery.expires_at is not None and delivery.expires_at - now <= _RETENTION_MARGIN_SECONDS:
        return GiveUpReason.RETENTION
    return None


def spent_before_run(
    delivery: Delivery,
    *,
    retries: int,
    max_retries: int | None,
    retry_for: float | None,
    crashes: int,
    crash_budget: int,
    now: float,
) -> GiveUpReason | None:
    """Say which budget was used up before this receive, so that the task must not even start.

    A message comes back with nothing left when no code of ours has seen its last run end: the
    whole worker was killed, or the dead-letter queue refused. A first receive always runs.

    Arguments: as for :func:`spent`, and ``crashes``, the runs known to have ended with their
    process, of which ``crash_budget`` are too many.
    """
    if crashes >= crash_budget:
        return GiveUpReason.WORKER_LOST
    if retries == 0:
        return None
    if max_retries is not None and retries > max_retries and not delivery.is_fifo:
        return GiveUpReason.MAX_RETRIES  # FIFO: most receives there may have been for nothing
    if retry_for is not None and now - _first_received_at(delivery) >= retry_for:
        return GiveUpReason.RETRY_FOR
    if delivery.is_overdue_for_dead_letter_queue:
        return GiveUpReason.MAX_RECEIVE_COUNT
    return None


def receives_needed(backoff: Policy, *, retry_for: float | None, max_retries: int | None) -> int:
    """About how many receives a message needs until its budgets end, at most 1,000.

    For comparison with a queue's ``maxReceiveCount``, of which SQS allows no more than 1,000. The
    delays are drawn, so another message may need a tenth more or less.
    """
    rng, elapsed, failures = Random(0), 0.0, 0
    while failures < MAX_MAX_RECEIVE_COUNT - 1:
        if max_retries is not None and failures >= max_retries:
            break
        if retry_for is not None and elapsed >= retry_for:
            break
        failures += 1
        elapsed += max(1.0, backoff.delay(failures, rng))
    return failures + 1


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


def capped(delay: float, ceiling: float, cap: float) -> float:
    """Shrink a delay drawn from 0 to ``ceiling`` to one from 0 to ``cap``, if that is less.

    Shrunk rather than cut, so that the draws stay spread.
    """
    return delay if ceiling <= cap else delay * cap / ceiling


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
