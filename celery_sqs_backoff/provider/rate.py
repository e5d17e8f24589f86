"""Decides when the next call to a provider may begin.

The agreed rate is GCRA with reservations. :class:`RecoveryRate` follows the capacity of a provider
that recovers. A call begins when both allow it.

A slot comes every ``1 / rate`` seconds. GCRA (generic cell rate algorithm, ITU-T I.371, annex A)
needs one number for that, the time of the next free slot. A worker takes the slots of the next
second for messages that it holds. A message that would wait for longer is hidden, and gets a place
in a second line of the same kind: the times at which hidden messages return, just as far apart as
slots. So they return one by one, whichever worker receives them. No slot is kept for a hidden
message, because SQS may show it late, or to another worker.

Two numbers, :class:`Times`, are the whole state. Where a fleet shares them they are in the store:
``provider.fleet``. Pure: times are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..retry.decision import Reply

#: Slots are handed out at this share of the agreed rate, so that calls that start a few
#: milliseconds late do not make a second fuller than agreed.
HEADROOM = 0.95

#: Seconds from now within which a worker may take slots. They are lost if the worker is killed.
AHEAD_SECONDS = 1.0

#: How long a message may wait in its worker, if it is new, and if it was received before. One that
#: would wait for longer is hidden.
NEW_SECONDS = 2.0
RETURNED_SECONDS = 10.0

#: Hidden messages return a little less often than slots come. The other slots are for messages that
#: return late, and for new ones.
RETURN_SHARE = 0.97

#: A slot that was missed by more is lost, for example after a pause of the process. Used later, it
#: would exceed the agreed rate.
LATEST_SECONDS = 0.1


@dataclass(slots=True)
class Times:
    """When the next slot is free, and when the next hidden message returns. Seconds."""

    free_at: float = 0.0
    back_at: float = 0.0

    def take_slots(self, most: int, now: float, rate: float) -> list[float]:
        """Take up to ``most`` slots, none further away than ``AHEAD_SECONDS``.

        Arguments:
            most: how many are wanted.
            now: seconds of the same clock.
            rate: slots a second.
        """
        taken = list[float]()
        self.free_at = max(self.free_at, now)
        while len(taken) < most and self.free_at <= now + AHEAD_SECONDS:
            taken.append(self.free_at)
            self.free_at += 1 / rate
        return taken

    def take_returns(self, holds: Sequence[float], now: float, rate: float) -> list[float | None]:
        """Return when to show each message that is hidden.

        ``None``: the time is too far for the message, and is left to another one.

        Arguments:
            holds: for each message, the most seconds that it may be hidden.
            now, rate: as above.
        """
        taken = list[float | None]()
        self.back_at = max(self.back_at, self.free_at, now)
        for hold in holds:
            is_near = self.back_at <= now + hold
            taken.append(self.back_at if is_near else None)
            if is_near:
                self.back_at += 1 / (rate * RETURN_SHARE)
        return taken


class RecoveryRate:
    """Calls a second that a recovering provider takes from this worker, as a bucket of tokens.

    The rate starts at one a second. Each success adds one until the provider refuses for the first
    time. So the rate doubles in about 0.7 seconds, but not before slow calls are answered. Later it
    grows by a share for each success, at most by a share for each second since the last cut. So
    neither fast nor slow calls exceed the provider's capacity.

    A refusal cuts the rate to four fifths. The first refusal cuts it to the successes of the last
    second, if they are fewer. Refusals within half a second count once, because many providers
    count the calls of each second and refuse the rest of it. Another failure cuts the rate only
    while more than half of the calls fail, because a provider that fails one call in five is not
    overloaded.

    In simulated outages a backlog of a minute takes 1.1 to 1.4 times the shortest time, and up to
    14 calls per 100 messages are refused. It takes longer in two cases. Fifty workers are 1.1 to
    1.8 times as slow, and up to 48 calls per 100 messages are refused, because each worker searches
    by itself. If half of all calls fail, the backlog takes 1.6 times the shortest time. In one
    of four runs it takes 9 times the shortest time, because gates open again and the last messages
    wait for probes that fail.
    """

    START, LOWEST = 1.0, 0.1
    BY_CALL, BY_SECOND = 0.025, 0.025
    KEPT, SETTLE_SECONDS = 0.8, 0.5
    #: An unused rate shrinks by this share a second, because no call tests it.
    IDLE = 0.1
    SAVED_SECONDS = 0.5
    TOLERATED, CALLS = 0.5, 16

    def __init__(self, now: float = 0.0) -> None:
        self.rate, self._tokens = self.START, 1.0
        self._is_refused = False
        self._oks: list[float] = []
        self._failing = 0.0
        self._filled_at = self._cut_at = self._grown_at = self.short_at = now

    def take(self, most: int, now: float) -> int:
        """Take tokens for up to ``most`` messages, and return their number."""
        self._fill(now)
        taken = min(most, int(self._tokens))
        self._tokens -= taken
        if taken < most:
            self.short_at = now
        return taken

    def seconds_to_turn(self, now: float) -> float:
        """Return the seconds until there is a token."""
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self.rate)

    def start_again(self) -> None:
        """Search for the provider's capacity from the start, after it has refused every call."""
        self.rate, self._is_refused = max(self.START, self.rate), False

    def ended(self, reply: Reply, began: float, now: float) -> None:
        """Note the provider's reply to a call that began at ``began``."""
        self._failing += ((reply is Reply.FAILED) - self._failing) / self.CALLS
        if reply is Reply.ANSWERED:
            self._grow(now)
            return
        if reply is Reply.FAILED:
            if self._failing <= self.TOLERATED:
                return
            self._failing /= 2
        if began > self._cut_at + (self.SETTLE_SECONDS if self._is_refused else 0):
            self._cut(now)

    def _grow(self, now: float) -> None:
        self._oks = [at for at in self._oks if at > now - 1] + [now]
        seconds, self._grown_at = min(now - self._grown_at, 1.0), now
        if now > self.short_at + 1:
            self.rate = max(self.START, self.rate * (1 - self.IDLE * seconds))
        elif not self._is_refused:
            self.rate += 1
        else:
            by_time = self.BY_SECOND * (now - self._cut_at) * seconds
            self.rate *= 1 + min(self.BY_CALL, by_time)

    def _cut(self, now: float) -> None:
        kept = self.KEPT * self.rate
        if not self._is_refused:
            kept = min(kept, max(1.0, len(self._oks)))
        self.rate, self._is_refused = max(self.LOWEST, kept), True
        self._cut_at = self._grown_at = now

    def _fill(self, now: float) -> None:
        most = max(1.0, self.rate * self.SAVED_SECONDS)
        self._tokens = min(most, self._tokens + max(0.0, now - self._filled_at) * self.rate)
        self._filled_at = max(now, self._filled_at)
