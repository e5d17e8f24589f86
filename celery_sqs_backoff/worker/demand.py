"""Computes how many messages to request from SQS now. No threads, clocks or I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..sqs.limits import MAX_BATCH_ENTRIES

#: Receive up to this many windows ahead of the tasks that are about to end. If tasks suddenly
#: take longer, that many more messages wait under their leases.
_MAX_AHEAD = 3

#: One call's worth is settled before the response is here; a second keeps the processes busy while
#: the response is unpacked and the next call is under way.
_CALLS_AHEAD = 2

#: Messages that may wait beside a window of others for something other than a process: for their
#: time, or for a rate limit.
MAX_BLOCKED = 100

#: The window where the user wants no limit (prefetch multiplier 0).
_NO_WINDOW = 1_000_000

#: A call that takes longer than this has waited for messages.
_WAITED_SECONDS = 1.0

#: Weight of the newest measurement in an average.
_WEIGHT = 1 / 8


@dataclass(frozen=True)
class Load:
    """What a worker holds, and what it could hold.

    Attributes:
        processes: that the pool has, or could have (autoscale).
        multiplier: of the prefetch window; 0 = no limit; 1 = no message waits for another.
        held: messages received and not settled.
        blocked: those of them that would not start if a process were free.
        expected: messages that calls under way are likely to bring.
        settled_during_a_call: messages expected to be settled before a call made now returns.
    """

    processes: int
    multiplier: int
    held: int = 0
    blocked: int = 0
    expected: int = 0
    settled_during_a_call: int = 0

    @property
    def window(self) -> int:
        """Messages that may run, or wait for a process."""
        return max(1, self.processes) * self.multiplier or _NO_WINDOW

    @property
    def room(self) -> int:
        """Messages that there will be room for when the response is here; may be negative."""
        room = self.window - (self.held - self.blocked) - self.expected
        if self.window > self.processes:  # else the user wants none to wait
            room += min(_MAX_AHEAD * self.window, _CALLS_AHEAD * self.settled_during_a_call)
        return min(room, self.window + MAX_BLOCKED - self.held - self.expected)

    @property
    def enough(self) -> int:
        """Room that makes a call worthwhile: then no more messages wait than there are processes,
        or a full batch is missing."""
        return max(1, min(MAX_BATCH_ENTRIES, self.window - self.processes))

    @property
    def batch(self) -> int:
        """Room that makes waiting for more pointless."""
        return max(self.enough, min(MAX_BATCH_ENTRIES, self.window))

    @property
    def wanted(self) -> int:
        """How many messages to ask for: 0 to 10."""
        return min(MAX_BATCH_ENTRIES, self.room) if self.room >= self.enough else 0


class Throughput:
    """Estimates, from recent calls, how many messages are settled while SQS responds to one.

    Times are passed in: seconds, of any one clock.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds_per_message = math.inf
        self._seconds_per_call = 0.0

    def settled(self, now: float, *, more: bool) -> None:
        """Note that a message was settled, and whether others are held."""
        if self._since is not None:
            self._seconds_per_message = _smooth(self._seconds_per_message, now - self._since)
        self._since = now if more else None

    def responded(self, now: float, seconds: float, *, full: bool) -> None:
        """Note the response to a call. Only one that brought all it could did not wait for it."""
        if full and seconds < _WAITED_SECONDS:
            self._seconds_per_call = _smooth(self._seconds_per_call or seconds, seconds)
            self._since = self._since or now

    @property
    def settled_during_a_call(self) -> int:
        """0 as long as nothing is known."""
        return self.settled_within(self._seconds_per_call)

    def settled_within(self, seconds: float) -> int:
        """How many messages a busy worker settles in so many seconds; 0 if nothing is known."""
        if self._seconds_per_message <= 0:
            return MAX_BATCH_ENTRIES
        return int(seconds / self._seconds_per_message)


def _smooth(average: float, value: float) -> float:
    return value if math.isinf(average) else average + (value - average) * _WEIGHT
