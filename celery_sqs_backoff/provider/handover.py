"""A worker stops: which of the messages that it has hidden come back sooner, and when?

Only this worker can bring them forward, and it will be gone. Left alone they come back when their
holds end, which may be hours after the provider. So they come back soon, spread over a while, to
workers that hide them again or recall them when the provider is back. Pure: no clock, no calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..retry.policies import RandomSource
from .recall import Hidden

__all__ = ["LEAST_GAIN_SECONDS", "LONGEST_SPREAD_SECONDS", "Nearer", "nearer"]

#: Messages of a worker that come back in a second, until the spread would be the longest.
RETURNS_PER_SECOND = 10.0
LONGEST_SPREAD_SECONDS = 180.0

#: A message that would come back by itself less than this later is left alone.
LEAST_GAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Nearer:
    """A message, and in how many seconds it is to come back."""

    hidden: Hidden
    seconds: int


def nearer(
    waiting: Iterable[Hidden], now: float, rng: RandomSource, *, is_down: bool
) -> list[Nearer]:
    """Return which messages come back sooner, in the order of ``waiting``.

    Args:
        waiting: what the worker remembers, all of which it certainly holds.
        now: seconds.
        rng: draws when each comes back.
        is_down: the provider is. Then a message stays that must run at its next receive because it
            is the last.
    """
    movable = [each for each in waiting if not (is_down and each.next_is_last)]
    spread = min(len(movable) / RETURNS_PER_SECOND, LONGEST_SPREAD_SECONDS)
    found, groups = [], dict[str, float]()
    for hidden in movable:
        drawn = rng.uniform(0.0, spread)
        if hidden.group is not None:  # together: SQS keeps their order
            drawn = groups.setdefault(hidden.group, drawn)
        seconds = math.ceil(max(drawn, hidden.not_before - now))
        if now + seconds + LEAST_GAIN_SECONDS < hidden.until:
            found.append(Nearer(hidden, seconds))
    return found
