"""How many messages may have reached SQS within one second, however long its calls take?

A :class:`~celery_sqs_backoff.redrive.pace.Pace` says when to send. But calls that take now longer,
now shorter, bring more messages into a second than were sent in it.
"""

from __future__ import annotations

import threading
from bisect import insort
from math import floor, inf

__all__ = ["Arrivals"]

#: Until the answer to a call that is under way is there: somewhat less than a call takes.
_LOOK_AGAIN_SECONDS = 0.005


class Arrivals:
    """Lets no more messages into any second than the rate and one. Safe for threads.

    Nobody knows when between its call and the answer a message arrives. Reckoned with is the
    latest: half of the shortest call before the answer; and now, while there is no answer. So SQS
    that takes ``t`` seconds for each call gets at most ``(rate + 1) / (1 + t / 2)`` messages per
    second.

    Arguments:
        rate: messages per second, above 0; ``None``: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._most = None if rate is None else floor(rate) + 1
        self._lock = threading.Lock()
        self._under_way = 0
        self._shortest = inf  # call, in seconds
        self._answered: list[tuple[float, int]] = []  # when, how many; the oldest first

    def begin(self, messages: int, now: float) -> float:
        """Return 0 if a call may begin, which then counts; else the seconds to wait and ask again.

        Arguments:
            messages: in the call. More than the rate and one (the rate was lowered meanwhile) go
                when nothing else has arrived within a second.
            now: seconds, monotonic.
        """
        if self._most is None:
            return 0.0
        with self._lock:
            # What was reckoned with as half of a call can turn out to be less, for all of them.
            while self._answered and self._answered[0][0] - self._shortest / 2 <= now - 1:
                del self._answered[0]
            too_many = self._under_way + messages - max(self._most, messages)
            too_many += sum(count for _, count in self._answered)
            if too_many <= 0:
                self._under_way += messages
                return 0.0
            return self._seconds_until(too_many, now)

    def end(self, messages: int, began: float, now: float) -> None:
        """Note the answer to a call that ``begin`` has let go."""
        if self._most is not None:
            with self._lock:
                self._under_way -= messages
                self._shortest = min(self._shortest, now - began)
                insort(self._answered, (now, messages))

    def _seconds_until(self, fewer: int, now: float) -> float:
        for answered_at, count in self._answered:
            fewer -= count
            if fewer <= 0:
                arrived_at = answered_at - self._shortest / 2
                return max(_LOOK_AGAIN_SECONDS / 5, arrived_at + 1 - now)
        return _LOOK_AGAIN_SECONDS
