"""Say when the next messages may be sent, so that the rate holds for each message.

A batch is not one message (the mistake of other tools: ten times the rate). Each message has a
time slot, ``1/rate`` after the one before it, and a batch is sent at the slot of its last message.
Unused slots are not made up for, except for half of one. So no second holds more than the rate and
one message, or two batches less one message where batches are larger. Because calls take different
times, a few more messages may arrive at SQS within one second.
"""

from __future__ import annotations

import threading

#: A ramp starts at this share of the rate.
RAMP_FROM = 0.1

#: How much of a slot a sender may be late and still keep to the schedule.
_TOLERANCE = 0.5

#: The share of a second's messages that may go in one batch.
_BATCH_SHARE = 1 / 80

_LARGEST_BATCH = 10


class Throttle:
    """Hands out slots. Safe for threads. Times are seconds of one monotonic clock.

    Arguments:
        rate: messages per second; ``None``: no limit.
        ramp: seconds from a tenth of the rate to all of it; 0 = no ramp.
    """

    def __init__(self, rate: float | None, *, ramp: float = 0.0) -> None:
        self._rate = rate
        self._ramp = ramp
        self._lock = threading.Lock()
        self._began: float | None = None
        self._next = 0.0  # the next free slot

    def batch_size(self, now: float) -> int:
        """Return the most messages to send in one call. Without a limit it is ten.

        Under a limit, an eightieth of the rate (so 1 below 160/s).
        """
        with self._lock:
            rate = self.rate_at(now)
            most = _LARGEST_BATCH if rate is None else int(_BATCH_SHARE * rate)
            return max(1, min(_LARGEST_BATCH, most))

    def reserve(self, messages: int, now: float) -> float:
        """Take the slots of some messages, and return when they may be sent."""
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
        """Return when the next slot is.

        ``None`` means now, because there is no limit or no message was sent.
        """
        return None if self._rate is None or self._began is None else self._next

    def _gap(self, now: float) -> float:
        rate = self.rate_at(now)
        return 0.0 if rate is None else 1 / rate

    def rate_at(self, now: float) -> float | None:
        """Return the messages per second at a time, or ``None`` without a limit."""
        if self._rate is None:
            return None
        ramp = 1.0
        if self._ramp:
            elapsed = 0.0 if self._began is None else max(0.0, now - self._began)
            share = min(1.0, elapsed / self._ramp)
            ramp = RAMP_FROM + (1 - RAMP_FROM) * share
        return self._rate * ramp


def seconds_for(messages: int, rate: float, ramp: float = 0.0) -> float:
    """Return the seconds that messages take at a rate (per second) with a ramp (seconds)."""
    if not ramp:
        return messages / rate
    during = rate * ramp * (1 + RAMP_FROM) / 2
    if messages >= during:
        return ramp + (messages - during) / rate
    # rate * (from * t + (1 - from) * t**2 / (2 * ramp)) = messages, solved for t
    a, b = (1 - RAMP_FROM) / (2 * ramp), RAMP_FROM
    return float((-b + (b * b + 4 * a * messages / rate) ** 0.5) / (2 * a))
