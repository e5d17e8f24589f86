"""Limit the rate of a redrive, counted in messages and not in batches.

Each message has a *slot*, the time at which it may be sent. Slots are ``1/rate`` seconds apart. A
batch is sent at the slot of its last message. A thread may still use a slot if it is late by at
most half of ``1/rate``. Older slots expire unused. So within one second the redrive sends at most
``rate`` messages and one batch more, for example 101 at 100/s and 810 at 800/s. Because calls take
different times, a few more messages may arrive at SQS within one second.
"""

from __future__ import annotations

import threading

#: A ramp starts at this share of the rate.
RAMP_FROM = 0.1

#: A thread may be late by this share of the time between two slots without losing its slot.
_TOLERANCE = 0.5

#: The share of a second's messages that may go in one batch.
_BATCH_SHARE = 1 / 80

_LARGEST_BATCH = 10


class Throttle:
    """Hands out slots. Safe for threads. Times are seconds of the run's clock.

    Arguments:
        rate: messages per second; ``None`` = no limit.
        ramp: seconds in which the rate rises from a tenth to the full rate; 0 = no ramp.
    """

    def __init__(self, rate: float | None, *, ramp: float = 0.0) -> None:
        self._rate = rate
        self._ramp = ramp
        self._lock = threading.Lock()
        self._began: float | None = None
        self._next = 0.0  # the next free slot

    def batch_size(self, now: float) -> int:
        """Return the largest number of messages to send in one call.

        Without a rate it is 10. With a rate it is an eightieth of the rate, at least 1 and at most
        10, so it is 1 below 160/s.
        """
        with self._lock:
            rate = self.rate_at(now)
            most = _LARGEST_BATCH if rate is None else int(_BATCH_SHARE * rate)
            return max(1, min(_LARGEST_BATCH, most))

    def reserve(self, messages: int, now: float) -> float:
        """Reserve the slots of a batch, and return the time at which to send the batch."""
        with self._lock:
            if self._began is None:
                self._began = self._next = now
            if self.rate_at(now) is None:
                return now
            slot = max(self._next, now - _TOLERANCE * self._gap(max(self._next, now)))
            for _ in range(messages - 1):
                slot += self._gap(slot)
            self._next = slot + self._gap(slot)
            return slot

    def next_at(self) -> float | None:
        """Return the time of the next free slot.

        ``None`` = a message may be sent now: there is no rate, or no slot was reserved yet.
        """
        return None if self._rate is None or self._began is None else self._next

    def _gap(self, now: float) -> float:
        rate = self.rate_at(now)
        return 0.0 if rate is None else 1 / rate

    def rate_at(self, now: float) -> float | None:
        """Return the rate (messages per second) at the time ``now``. ``None`` = no limit."""
        if self._rate is None:
            return None
        ramp = 1.0
        if self._ramp:
            elapsed = 0.0 if self._began is None else max(0.0, now - self._began)
            share = min(1.0, elapsed / self._ramp)
            ramp = RAMP_FROM + (1 - RAMP_FROM) * share
        return self._rate * ramp


def seconds_for(messages: int, rate: float, ramp: float = 0.0) -> float:
    """Return how many seconds it takes to send a number of messages.

    Arguments:
        rate: messages per second.
        ramp: seconds in which the rate rises from a tenth to the full rate; 0 = no ramp.
    """
    if not ramp:
        return messages / rate
    during = rate * ramp * (1 + RAMP_FROM) / 2
    if messages >= during:
        return ramp + (messages - during) / rate
    # rate * (from * t + (1 - from) * t**2 / (2 * ramp)) = messages, solved for t
    a, b = (1 - RAMP_FROM) / (2 * ramp), RAMP_FROM
    return float((-b + (b * b + 4 * a * messages / rate) ** 0.5) / (2 * a))
