"""Messages that wait for their turns at their providers, and the thread that sees to them.

A provider has one line in a worker. A message starts when it has a slot, if a rate is agreed, and a
token, if the provider recovers. The slower of the two decides. Celery's event loop puts a message
in line and goes on, and never waits for a store. One thread lets messages start, hides
them, and brings hidden ones forward. Another thread only waits for the store, which it asks for
slots, with one call for all messages in line. If the store is away or slow, each worker makes its
own share of the calls. It keeps to that share for some seconds after the store's return, because
others may not know of it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from celery.utils.log import get_logger

from ..provider.fleet import FleetSlots, Taken, present_seconds
from ..provider.gate import ProviderGate
from ..provider.rate import (
    HEADROOM,
    LATEST_SECONDS,
    NEW_SECONDS,
    Departure,
    Line,
    Place,
    Times,
    assign,
)
from ..text import BUG_CALLS, error_site, printable
from ..threads import start_daemon

logger = get_logger(__name__)

#: A store without an answer for this time counts as away.
_PATIENCE_SECONDS: Final = 1.0

#: A slow store that answers other lines counts as away for a line that waits longer than this.
_LONGEST_PATIENCE_SECONDS: Final = 10.0

#: Until a store that is away is asked again.
_AWAY_SECONDS: Final = 2.0

#: A worker keeps to its own share for this time after the store's return, because others may make
#: their shares of the rate until they notice it too: after a call's timeout and `_AWAY_SECONDS`.
_RETURN_SECONDS: Final = 10.0

#: Until then it asks for the slots of this many seconds in one call. A store answers sooner.
_SHARE_SECONDS: Final = 0.02

#: The rate of a recovery changes with each call: how long not to look at it.
_LONGEST_TURN_SECONDS: Final = 0.25

#: Messages may have the slots of one second before their tasks begin. Without any, a small pool
#: would lose a third of its slots. With all, the tasks would begin together after a call that hung.
_OUTSTANDING_SECONDS: Final = 1.0

#: A look for hidden messages that has failed is repeated.
_AFTER_FAULT_SECONDS: Final = 1.0

#: Between two looks whether tasks have begun, while others wait for that.
_PROCESS_LOOK_SECONDS: Final = 0.02

#: A slot may be further away than a thread can sleep.
_LONGEST_PAUSE_SECONDS: Final = 3600.0

#: Workers to share a rate with, if the store has not said lately how many there are. It counts only
#: workers that take slots, so a worker that took no slot lately may have been told of itself alone.
_WORKERS_UNKNOWN: Final = 10


@dataclass(frozen=True, eq=False)
class Paced:
    """A message that may start but for its turn.

    Attributes:
        start: called with its slot in the pacer's thread, at that time (infinity: no slot is
            needed). Must not block.
        hide: called with the time until which to hide it. Must not block.
        is_over: whether it was settled elsewhere.
        has_slot: whether it was started with a slot, and its task has not begun.
    """

    start: Callable[[float], object]
    hide: Callable[[float], object]
    is_over: Callable[[], bool]
    has_slot: Callable[[], bool] = lambda: False


class Pace:
    """One provider's line in this worker. Belongs to a :class:`Pacer`, under its lock.

    A message that starts with a slot is outstanding until its task begins, or it gives up its slot:
    it is settled, lost, hidden, or in line again. Without room for another outstanding message,
    slots go by unused.

    Arguments:
        name: of the provider, for the log.
        rate: agreed slots a second; ``None``: no rate is agreed.
        fleet: where slots are shared, or ``None`` if each worker has the rate for itself.
        gate: says how many messages may start. The rest waits.
    """

    def __init__(
        self,
        name: str,
        rate: float | None,
        fleet: FleetSlots | None,
        gate: ProviderGate,
    ) -> None:
        self.name = name
        self.has_rate = rate is not None
        self.rate = (rate or 0.0) * HEADROOM
        self.fleet = fleet
        self._gate = gate
        self.line: Line[Paced] = Line(lambda paced: paced.is_over(), needs_slots=self.has_rate)
        self.workers, self.told_at = _WORKERS_UNKNOWN, -math.inf
        #: Since when a message is in line that has no place.
        self.waiting_since: float | None = None
        self.away_until: float | None = None
        self.keeps_share_until = -math.inf
        self.times = Times()
        self._last_slot = -math.inf
        self._store_ahead: float | None = None
        self._outstanding: list[Paced] = []
        self._missed = 0

    @property
    def most(self) -> int:
        """How many messages may have their slots and wait for a process."""
        return math.ceil(_OUTSTANDING_SECONDS * self.share)

    @property
    def share(self) -> float:
        """Slots a second of this worker, if all workers take as many."""
        return self.rate if self.fleet is None else self.rate / self.workers

    @property
    def room(self) -> int:
        """The number of messages that may start now."""
        return max(0, self.most - len(self._outstanding))

    @property
    def is_behind(self) -> bool:
        """Whether slots were lost, and fewer tasks have begun since."""
        return self._missed > 0

    def note_begun(self) -> None:
        """Forget messages that have used their slots, or that will not use them."""
        outstanding = [paced for paced in self._outstanding if paced.has_slot()]
        self._missed = max(0, self._missed - len(self._outstanding) + len(outstanding))
        self._outstanding = outstanding

    def lacking(self, now: float) -> list[tuple[Paced, float]]:
        """Return the messages without a place, and how long each may wait.

        A worker that is behind asks only for the slots that it can use in a row, so that others may
        use the rest. A worker that keeps to its share asks at the pace of its share.
        """
        found = self.line.lacking(self.room if self.is_behind else None)
        if now >= self.keeps_share_until:
            return found
        is_due = now >= self.times.free_at
        return found[: max(1, int(self.share * _SHARE_SECONDS))] if is_due else []

    def depart(self, now: float) -> Departure[Paced]:
        ready = self.line.ready(now)
        if self.has_rate:
            ready = min(ready, self.room)
        departure = self.line.depart(now, self._gate.turns(ready, now) if ready else 0)
        if not self.has_rate:
            return departure
        self._outstanding += [paced for paced, _ in departure.start]
        self._missed = self._missed + departure.missed if len(self.line) else 0
        return departure

    def next_at(self, now: float) -> float | None:
        """Return when messages may start or ask for slots, or ``None`` before they have slots."""
        turn = now + min(_LONGEST_TURN_SECONDS, self._gate.rate.seconds_to_turn(now))
        if not self.has_rate:
            return turn
        at, look = self.line.next_at(), now + _PROCESS_LOOK_SECONDS
        if now < self.times.free_at and now < self.keeps_share_until:
            at = self.times.free_at if at is None else min(at, self.times.free_at)
        if at is not None and at <= now:  # it has its slot, and waits for a token
            return max(turn, look)
        if self.room and not self.is_behind:
            return at
        return min(at, look) if self.room and at is not None else look

    def give_local(self, now: float) -> None:
        """Give places of this worker's own, at its share of the rate."""
        self.waiting_since = None
        asked = self.lacking(now)
        longest = [seconds for _, seconds in asked]
        places, self.times = assign(self.times, now, longest, rate=self.share)
        self.line.give(asked, places)

    def give_shared(
        self, asked: list[tuple[Paced, float]], taken: Taken, asked_at: float, now: float
    ) -> None:
        """Give places that the fleet's store has handed out.

        Slots that arrive late begin one by one. All together, with the slots of other workers, they
        would be more calls than agreed.
        """
        self.waiting_since = None
        then = self._time_here(taken.now, asked_at, now)
        places = []
        for place in taken.places:
            at = then + place.at
            if place.is_slot:
                at = max(at, now, self._last_slot + 1 / self.rate)
                self._last_slot = at
            places.append(Place(at, place.is_slot))
        self.line.give(asked, places)
        if now < self.keeps_share_until:
            due_at = max(self.times.free_at, asked_at - LATEST_SECONDS)
            self.times = Times(due_at + len(asked) / self.share)

    def _time_here(self, there: float, asked_at: float, now: float) -> float:
        """Return a time of the store's clock by this worker's.

        It lies between question and answer, which are far apart while a machine is busy. So the
        difference that an earlier answer has shown holds as long as it can be true.
        """
        least, most = there - now, there - asked_at
        ahead = (least + most) / 2 if self._store_ahead is None else self._store_ahead
        self._store_ahead = min(max(ahead, least), most)
        return there - self._store_ahead

    def leave_fleet(self, now: float) -> None:
        """Go on with this worker's own slots, once the last slots of the fleet are used.

        Other workers have slots, too, and for new messages none that is further away. All begin
        then, so each leaves out one slot, and keeps in step with its last one of the fleet.
        """
        first = (now if self.waiting_since is None else self.waiting_since) + NEW_SECONDS
        if self._last_slot > -math.inf:
            steps = 1 + max(1, math.ceil((first - self._last_slot) * self.share))
            first = self._last_slot + steps / self.share
        self.times = Times(first)
        self.keeps_share_until = -math.inf

    def rejoin_fleet(self, now: float) -> None:
        """Go on with the fleet's slots, but not with more than this worker's share of them yet."""
        unused = self.line.next_at()
        self.line.take_back()
        self.times = Times(self.times.free_at if unused is None else unused)
        self.keeps_share_until = now + _RETURN_SECONDS


class Pacer:
    """The lines of a worker, and their two threads, which start with the first message.

    Arguments:
        clock: seconds, monotonic.
        lock: of the gates.
        look: brings hidden messages forward, and returns the seconds until its next look, or
            ``None`` to wait for :meth:`look_soon`.
    """

    def __init__(
        self, clock: Callable[[], float], lock: threading.RLock, look: Callable[[], float | None]
    ) -> None:
        self._clock, self._lock, self._look = clock, lock, look
        self._look_at = math.inf
        self._changed = threading.Condition(self._lock)
        self._wanted = threading.Condition(self._lock)
        self._busy: dict[Pace, None] = {}
        self._to_ask: dict[Pace, None] = {}
        self._threads: list[threading.Thread] = []
        self._answered_at = -math.inf
        self._is_stopping = False

    def join(self, pace: Pace, paced: Paced, longest: float) -> None:
        """Put a message in line, to wait for ``longest`` seconds at most. Does not block."""
        with self._lock:
            pace.line.join(paced, longest)
            self._busy[pace] = None
            self._start_threads()
            self._changed.notify()

    def look_soon(self) -> None:
        """Let the thread look for messages to bring forward. Does not block."""
        with self._lock:
            self._look_at = -math.inf
            self._start_threads()
            self._changed.notify()

    def stop(self) -> None:
        """Let no message start. Waiting messages are given back by their leases."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
            self._wanted.notify_all()

    def fault(self) -> str | None:
        """Return which thread has died, or ``None``. Without the first, no message in line starts.

        For the heartbeat, so it does not wait for the lock.
        """
        dead = [thread.name for thread in tuple(self._threads) if not thread.is_alive()]
        return f"the thread {dead[0]} has died" if dead and not self._is_stopping else None

    def _start_threads(self) -> None:
        if self._is_stopping:
            return
        wanted = (("sqs-pace", self._pace), ("sqs-slots", self._ask))
        for name, run in wanted[len(self._threads) :]:
            thread = start_daemon(name, run)
            if thread is None:
                logger.warning("sqs_backoff.no_thread_left: messages wait for their turns")
                return
            self._threads.append(thread)

    # One thread: messages start

    def _pace(self) -> None:
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                actions = self.step(self._clock())
                if not actions:
                    self._changed.wait(self._pause())
                    continue
            for action in actions:
                try:
                    action()
                except Exception as exc:  # noqa: BLE001
                    # A bug. Messages come back by themselves; the thread has others to see to.
                    logger.error("sqs_backoff.pacing_failed: %s", error_site(exc, calls=BUG_CALLS))

    def step(self, now: float) -> list[Callable[[], object]]:
        """Give slots that need no store, and return the calls to make now."""
        actions: list[Callable[[], object]] = []
        with self._lock:
            for pace in list(self._busy):
                pace.note_begun()
                self._see_to_slots(pace, now)
                departure = pace.depart(now)
                self._see_to_slots(pace, now)  # of messages that have missed theirs
                actions += [functools.partial(paced.start, at) for paced, at in departure.start]
                actions += [functools.partial(paced.hide, until) for paced, until in departure.hide]
                if not len(pace.line):
                    del self._busy[pace]
            if now >= self._look_at:
                self._look_at = now + _AFTER_FAULT_SECONDS
                actions.append(self._look_now)
        return actions

    def _look_now(self) -> None:
        seconds = self._look()
        with self._lock:
            if self._look_at > -math.inf:  # else a look is planned already
                self._look_at = math.inf if seconds is None else self._clock() + seconds

    def _see_to_slots(self, pace: Pace, now: float) -> None:
        if not pace.lacking(now):
            pace.waiting_since = None
            return
        if pace.fleet is None:
            pace.give_local(now)
            return
        if pace.waiting_since is None:
            pace.waiting_since = now
        elif now >= self._patience_ends(pace.waiting_since):
            self._note_away(pace, now, "no answer")
        if pace.away_until is not None:
            pace.give_local(now)
        if pace.away_until is None or now >= pace.away_until:
            self._to_ask[pace] = None
            self._wanted.notify()

    def _patience_ends(self, waiting_since: float) -> float:
        """Return when the store counts as away for a line.

        Each answer to another line is progress.
        """
        silent_since = max(waiting_since, self._answered_at)
        return min(silent_since + _PATIENCE_SECONDS, waiting_since + _LONGEST_PATIENCE_SECONDS)

    def _pause(self) -> float | None:
        """Return the seconds until a message may start, or a store's answer is overdue."""
        now = self._clock()
        times = [self._look_at] if self._look_at < math.inf else []
        times += [at for pace in self._busy if (at := pace.next_at(now)) is not None]
        times += [
            self._patience_ends(pace.waiting_since)
            for pace in self._busy
            if pace.waiting_since is not None
        ]
        if not times:
            return None
        return min(max(0.0, min(times) - now), _LONGEST_PAUSE_SECONDS) + 0.001

    # The other: slots are taken

    def _ask(self) -> None:
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                if not self._to_ask:
                    self._wanted.wait()
                    continue
                pace = next(iter(self._to_ask))
                del self._to_ask[pace]
                asked = pace.lacking(self._clock())
                if pace.away_until is not None:
                    if self._clock() < pace.away_until:
                        continue
                    asked = []  # ask whether it is back
                elif not asked:
                    continue
            self.ask(pace, asked)

    def ask(self, pace: Pace, asked: list[tuple[Paced, float]]) -> None:
        """Ask a line's store for places, and give them."""
        assert pace.fleet is not None
        asked_at = self._clock()
        try:
            taken = pace.fleet.take([longest for _, longest in asked])
        except Exception as exc:  # noqa: BLE001  # of any library: the message must not wait for it
            with self._lock:
                self._note_away(pace, self._clock(), type(exc).__name__)
                self._changed.notify()
            return
        with self._lock:
            now = self._answered_at = self._clock()
            pace.workers, pace.told_at = max(1, taken.workers), now
            if pace.away_until is None:
                pace.give_shared(asked, taken, asked_at, now)
            elif now - asked_at > _PATIENCE_SECONDS:  # the next message would wait in vain too
                self._note_away(pace, now, "a late answer")
            else:  # the messages have places of this worker's own
                pace.away_until = None
                pace.rejoin_fleet(now)
                logger.info(
                    "sqs_backoff.rate_shared_again: %s: the store answers", printable(pace.name)
                )
            self._changed.notify()

    def _note_away(self, pace: Pace, now: float, why: str) -> None:
        if pace.away_until is None:
            if now > pace.told_at + present_seconds(pace.rate):
                pace.workers = max(pace.workers, _WORKERS_UNKNOWN)
            pace.leave_fleet(now)
            logger.warning(
                "sqs_backoff.rate_store_away: %s: %s; this worker makes 1/%d of the agreed rate"
                " until the store answers",
                printable(pace.name),
                printable(why),
                pace.workers,
            )
        pace.away_until = now + _AWAY_SECONDS
