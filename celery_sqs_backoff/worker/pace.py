"""How fast the pool is beside SQS: how many messages it settles while a call is under way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..limits import MAX_BATCH_ENTRIES

__all__ = ["Pace"]

#: Weight of the newest measurement in an average.
_WEIGHT = 1 / 8


class Pace:
    """How many messages are settled while SQS answers a call, as far as the last ones tell.

    Arguments:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seconds_per_message = math.inf
        self._seconds_per_call = 0.0

    def settled(self, *, more: bool) -> None:
        """Note that a message was settled, and whether others are held."""
        now = self._clock()
        if self._since is not None:
            self._seconds_per_message = _smooth(self._seconds_per_message, now - self._since)
        self._since = now if more else None

    def answered(self, seconds: float, *, full: bool) -> None:
        """Note the answer to a call. Only one that brought all it could did not wait for it."""
        if full:
            self._seconds_per_call = _smooth(self._seconds_per_call or seconds, seconds)
            self._since = self._since or self._clock()

    def settled_during_a_call(self) -> int:
        """0 as long as nothing is known."""
        if self._seconds_per_message <= 0:
            return MAX_BATCH_ENTRIES
        return int(self._seconds_per_call / self._seconds_per_message)


def _smooth(average: float, value: float) -> float:
    return value if math.isinf(average) else average + (value - average) * _WEIGHT
