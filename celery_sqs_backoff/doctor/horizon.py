"""How far a number of receives reaches, in the time of an outage: the consequence of a setting.

By the policy itself and by the simulator, with a fixed seed: the same set-up gets the same words.
"""

from __future__ import annotations

from random import Random

from ..retry.budget import receives_needed, tolerant
from ..retry.policies import Policy
from ..simulate.forecast import forecast, scenario_of_queue
from ..simulate.scenario import Scenario, Task
from ..sqs.limits import MAX_MAX_RECEIVE_COUNT

__all__ = ["dead_lettered_after", "receives_within"]

_DRAWS = 200
_MOST_SIMULATED = 200
#: In all: with many receives of each, fewer messages are simulated, to take less than a second.
_MOST_SIMULATED_RECEIVES = 20_000
_SEED = 0


def dead_lettered_after(
    backoff: Policy,
    receives: int,
    *,
    retry_for: float | None,
    max_retries: int | None,
    depth: int,
    retention: int,
) -> tuple[float, float]:
    """Simulate an outage that does not end; return when messages become dead letters, in seconds.

    The first of them, and half of them, of as many messages as the queue has, but 200 at the most,
    fewer with more than 100 receives: while all calls fail they do not influence one another.

    Args:
        backoff: the delays.
        receives: the queue's ``maxReceiveCount``.
        retry_for: seconds; ``None`` = no limit.
        max_retries: ``None`` = no limit.
        depth: messages in the queue; 0 = not known.
        retention: the queue's, in seconds.
    """
    most = min(_MOST_SIMULATED, _MOST_SIMULATED_RECEIVES // max(1, receives))
    backlog = min(most, max(0, depth) or most)
    task = Task(backoff=tolerant(backoff), retry_for=retry_for, max_retries=max_retries)
    found = forecast(
        scenario_of_queue(
            Scenario(name="an outage", task=task),
            {
                "MessageRetentionPeriod": str(retention),
                "ApproximateNumberOfMessages": str(backlog),
            },
            max_receive_count=receives,
        ),
        seed=_SEED,
    )
    half = next((at for at, dead in found.given_up if dead >= found.messages / 2), found.horizon)
    return found.first if found.first is not None else found.horizon, half


def receives_within(
    backoff: Policy, *, retry_for: float | None, max_retries: int | None, share: float = 0.99
) -> int:
    """Return the receives that ``share`` of the messages make do with until their budget ends.

    Arguments:
        backoff: the delays.
        retry_for: seconds; ``None`` = no limit.
        max_retries: ``None`` = no limit.
        share: 0 to 1.

    At most 1,001: more than a redrive policy allows. A task without an end makes do with 1,000.
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
        for _ in range(_DRAWS)
    )
    return counts[min(len(counts) - 1, int(share * len(counts)))]
