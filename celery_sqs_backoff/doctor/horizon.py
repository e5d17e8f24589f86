"""Estimate how many receives a message needs, and when it becomes a dead letter in an outage.

The functions draw delays at random from the task's delay policy. The seed is fixed, so a finding
has the same numbers each time.
"""

from __future__ import annotations

from random import Random

from ..retry.budget import receives_needed, tolerant
from ..retry.policies import Policy
from ..sqs.limits import MAX_MAX_RECEIVE_COUNT

DRAWS = 200

#: How many delays to draw for a queue at most. Workers estimate at their start, so an estimate must
#: not take long.
_MOST_DELAYS = 10_000

_SEED = 0


def estimate_seconds_to_dead_letter(
    backoff: Policy,
    receives: int,
    *,
    retry_for: float | None,
    max_retries: int | None,
    retention: int,
) -> float:
    """Return the seconds of an outage after which half of the messages are dead letters.

    The estimate assumes that every call fails, and that no message waits for another message. A
    message then becomes a dead letter after the sum of its delays, or after ``retry_for`` or the
    retention period if one of them is shorter than this sum.

    Args:
        backoff: the delay policy.
        receives: the queue's ``maxReceiveCount``.
        retry_for: seconds; ``None`` = no limit.
        max_retries: ``None`` = no limit.
        retention: seconds that the queue keeps a message.
    """
    rng, backoff = Random(_SEED), tolerant(backoff)
    retries = receives - 1 if max_retries is None else min(receives - 1, max_retries)
    longest = retention if retry_for is None else min(retention, retry_for)
    ends = sorted(
        min(longest, sum(max(1.0, backoff.delay(n, rng)) for n in range(1, retries + 1)))
        for _ in range(max(1, min(DRAWS, _MOST_DELAYS // max(1, retries))))
    )
    return ends[len(ends) // 2]


def estimate_receives(
    backoff: Policy, *, retry_for: float | None, max_retries: int | None, draws: int = DRAWS
) -> int:
    """Return the number of receives that is enough for the retries of 99 of 100 messages.

    ``retry_for`` or ``max_retries`` ends the retries. SQS allows at most 1,000 receives. If 1,000
    are not enough, the result is 1,001. If both options are ``None``, the retries never end, and
    the result is 1,000.

    Args:
        backoff: the delay policy.
        retry_for: seconds; ``None`` = no limit.
        max_retries: ``None`` = no limit.
        draws: number of messages to simulate. With 1, the result is a rough estimate.
    """
    rng, has_end = Random(_SEED), retry_for is not None or max_retries is not None
    counts = sorted(
        receives_needed(
            backoff,
            retry_for=retry_for,
            max_retries=max_retries,
            at_most=MAX_MAX_RECEIVE_COUNT + has_end,
            rng=rng,
        )
        for _ in range(draws)
    )
    return counts[int(0.99 * draws)]
