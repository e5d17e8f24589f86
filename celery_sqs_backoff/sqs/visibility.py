"""How long SQS lets a message stay hidden, and where a received message stands against budgets."""

from __future__ import annotations

import math
import time
from typing import Final

from ..retry.budget import Standing
from .delivery import Delivery
from .limits import MAX_VISIBILITY_TIMEOUT_SECONDS, MAX_WAIT_TIME_SECONDS

#: SQS counts the 12 hours from the *request* for the message, which a long poll may have made
#: MAX_WAIT_TIME_SECONDS before the worker saw the response; the rest is for clocks and slow calls.
TWELVE_HOURS_MARGIN_SECONDS: Final = MAX_WAIT_TIME_SECONDS + 40

#: A message that is hidden until retention deletes it is lost; come back this much earlier.
_RETENTION_MARGIN_SECONDS: Final = 300


#: Linux stops CLOCK_MONOTONIC during a suspend, but not CLOCK_BOOTTIME. On macOS
#: ``time.monotonic()`` stops, but CLOCK_MONOTONIC goes on.
#: https://docs.python.org/3/library/time.html#time.CLOCK_BOOTTIME
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_seconds() -> float:
    """Return seconds on a clock that never goes back and that counts a suspend."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def visibility_delay(delay: float, delivery: Delivery, *, now: float) -> int:
    """Turn a drawn delay into whole seconds that SQS allows, at least 1.

    SQS allows the rest of its 12 hours since the receive, and of the queue's retention period.
    Rounds up, so that a draw spread over (0, n] is spread evenly over 1..n.
    """
    longest = (
        MAX_VISIBILITY_TIMEOUT_SECONDS
        - TWELVE_HOURS_MARGIN_SECONDS
        - max(0.0, now - delivery.received_at)
    )
    if delivery.expires_at is not None:
        longest = min(longest, delivery.expires_at - _RETENTION_MARGIN_SECONDS - now)
    longest = max(1, math.floor(longest))
    return longest if delay >= longest else max(1, math.ceil(delay))


def standing(delivery: Delivery, *, retries: int, now: float) -> Standing:
    """Return where a message stands against its budgets.

    Arguments:
        delivery: this receive.
        retries: runs before this one, at the most.
        now: seconds since the epoch.
    """
    expires_at, most = delivery.expires_at, delivery.max_receive_count
    return Standing(
        retries=retries,
        elapsed=max(0.0, now - delivery.first_due_at),
        is_last_receive=delivery.is_last_before_sqs_moves_it,
        is_overdue=most is not None and delivery.receive_count > most,
        is_expiring=expires_at is not None and expires_at - now <= _RETENTION_MARGIN_SECONDS,
    )
