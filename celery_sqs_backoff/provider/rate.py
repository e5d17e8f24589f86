"""Decides when the next call to a provider may begin.

:class:`Times` spaces calls at the agreed rate, which is the ``rate`` of the provider's settings.
:class:`RecoveryRate` follows the capacity of a provider that recovers. A call begins when both
classes allow it.

A slot is a time at which one call may begin. Slots are ``1 / rate`` seconds apart. ``Times`` gives
them out by the GCRA (generic cell rate algorithm, ITU-T I.371, annex A). This algorithm stores only
the time of the next free slot. A worker takes slots at most one second ahead, and only for messages
that it has received.

If a message would wait too long for a slot, the worker hides it until a time of return. The times
of return are a second series, a little further apart than the slots. So hidden messages return one
by one. A hidden message gets its slot only after its return, because SQS may show it late, or to
another worker.

An agreed rate needs no state except the two numbers of :class:`Times`. If workers share the rate,
these numbers are in the store (``provider.fleet``). This module reads no clock: callers pass times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..retry.decision import Reply

#: Slots come at this share of the agreed rate. Some calls begin a few milliseconds late, so at the
#: full rate a second could contain more calls than agreed.
HEADROOM = 0.95

#: A worker takes slots only this many seconds ahead, because its slots are lost if it is killed.
AHEAD_SECONDS = 1.0

#: The longest times in seconds that a message may wait in the worker for its slot. The first is for
#: a new message, the second for a message that was received before. The worker hides a message that
#: would have to wait for longer than this.
NEW_SECONDS = 2.0
RETURNED_SECONDS = 10.0

#: Hidden messages get return times for only this share of the slots. The other 3 % are for messages
#: that return late, and for new messages.
RETURN_SHARE = 0.97

#: A call may begin up to this many seconds after its slot. An older slot is lost, for example after
#: a pause of the process. Otherwise the calls of many old slots would begin together, above the
#: agreed rate.
LATEST_SECONDS = 0.1


@dataclass(slots=True)
class Times:
    """The next free slot, and the next free time of return for a hidden message, in seconds."""

    free_at: float = 0.0
    back_at: float = 0.0

    def take_slots(self, most: int, now: float, rate: float) -> list[float]:
        """Take up to ``most`` slots within the next ``AHEAD_SECONDS``. Return their times.

        Arguments:
            most: the number of slots wanted.
            now: the time, on the clock of ``free_at`` and ``back_at``.
            rate: slots a second.
        """
        taken = list[float]()
        self.free_at = max(self.free_at, now)
        while len(taken) < most and self.free_at <= now + AHEAD_SECONDS:
            taken.append(self.free_at)
            self.free_at += 1 / rate
        return taken

    def take_returns(self, holds: Sequence[float], now: float, rate: float) -> list[float | None]:
        """Take a time of return for each message to hide. Return these times.

        ``None`` in the result: this message must not stay hidden until the next free time, which
        stays free for another message.

        Arguments:
            holds: for each message, the longest time in seconds that it may be hidden.
            now, rate: as for ``take_slots``.
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
    """Estimates how many calls a second a recovering provider takes from this worker.

    The class is a token bucket that fills at this rate. Each call takes a token.

    The rate starts at one call a second. Until the provider refuses a call for the first time, each
    success adds one call a second. So the rate doubles in about 0.7 seconds, or more slowly if
    calls are slow. After the first refusal, each success makes the rate 2.5 % larger. Many fast
    calls would let the rate grow too fast, so its growth in one second is limited. The limit is
    2.5 % for each second since the last cut, for example 10 % four seconds after the cut.

    A refusal cuts the rate to four fifths. The first refusal cuts it to the number of successes in
    the last second, if that is less. A refusal does not count if its call began before the last
    cut, or within half a second after it. The reason is that many providers count the calls of each
    second. Above their limit, they refuse all calls until the second ends. A failure that is no
    refusal cuts the rate only while more than half of the calls fail. A provider at which only one
    call in five fails is not overloaded.

    ``python -m benchmarks.recovery`` simulates 30 outages, eight times each. After most of them,
    the workers need 1.1 to 1.4 times the shortest possible time for the backlog. The average is
    1.3, with 8 refused calls per 100 messages. The slowest simulation needs 1.6 times the shortest
    time, because half of the calls fail for half an hour after the outage. With fifty workers, up
    to 47 calls per 100 messages are refused, because each worker searches for the capacity alone.
    """

    START, LOWEST = 1.0, 0.1
    BY_CALL, BY_SECOND = 0.025, 0.025
    KEPT, SETTLE_SECONDS = 0.8, 0.5
    #: While no message has to wait for a token, the rate shrinks by this share a second. The calls
    #: are then too few to show that the provider takes the full rate.
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
        """Take up to ``most`` tokens, and return their number."""
        self._fill(now)
        taken = min(most, int(self._tokens))
        self._tokens -= taken
        if taken < most:
            self.short_at = now
        return taken

    def seconds_to_turn(self, now: float) -> float:
        """Return the seconds until a token is free."""
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self.rate)

    def start_again(self) -> None:
        """Search for the provider's capacity again, after a time in which no call has succeeded.

        Until the next refusal, each success adds one call a second, as at the start.
        """
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
