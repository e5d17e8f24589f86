"""Keeps messages in line for their providers, and starts each when its turn comes.

Each provider has one line of waiting messages in a worker. If a rate is agreed, a message needs a
slot, which is a time at which one call may begin. While the provider recovers from an outage, a
message needs a token of :class:`.RecoveryRate`. If a message needs a slot and a token, it starts
when it has both.

Celery's event loop puts messages in line, and never waits for a store. The thread ``sqs-pace``
starts messages, hides them, and brings hidden messages forward (asks SQS to show them early). The
thread ``sqs-slots`` asks the store for slots, and waits for its answers. A store is away if it does
not answer in time. While the store is away, each worker makes its share of the calls without it,
for example a tenth with ten workers.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from celery.utils.log import get_logger

from ..provider.fleet import FleetSlots, Taken, present_seconds
from ..provider.gate import ProviderGate
from ..provider.rate import AHEAD_SECONDS, HEADROOM, LATEST_SECONDS, Times
from ..text import BUG_CALLS, error_site, printable
from ..threads import start_daemon
from .lease import Lease

logger = get_logger(__name__)

#: A store that has not answered for this time counts as away. By then this worker has used all
#: slots that the store had given to it.
_PATIENCE_SECONDS: Final = AHEAD_SECONDS

#: Pause before the next request to a store that has not answered.
_AWAY_SECONDS: Final = 2.0

#: Least pause between two requests for slots to a store that answers.
_ASK_SECONDS: Final = 0.1

#: Pause between two checks of a provider's waiting line, if the provider has an agreed rate.
_LOOK_SECONDS: Final = 0.05

#: Longest pause between two checks of a provider's waiting line, if no rate is agreed for the
#: provider. Messages then wait in the line only during a recovery. The rate of the recovery changes
#: with each call, so after a longer pause a message could start too late.
_LONGEST_TURN_SECONDS: Final = 0.25

#: A worker takes slots in advance for at most 0.2 s, for example 10 slots at 50 a second. If the
#: processes are busy, the messages with these slots wait, and may all begin together when processes
#: become free. In this case, one second contains up to a fifth more calls than agreed. With a limit
#: below 0.2 s, a small pool could not use its whole rate.
_OUTSTANDING_SECONDS: Final = 0.2

#: If a message with a slot has not begun in this time, the worker assumes that the message waits
#: for a process.
_STUCK_SECONDS: Final = 1.0

#: Pause before the next search for messages to bring forward, if a search has failed.
_AFTER_FAULT_SECONDS: Final = 1.0

#: A message is hidden for this time at most. SQS hides it for at most 12 hours after its receive.
_LONGEST_RETURN_SECONDS: Final = 11 * 3600.0

#: The least number of workers to assume if the store's last count is old. The store counts only
#: workers that have asked for slots lately. So an old count may be too low.
_WORKERS_UNKNOWN: Final = 10


class Pace:
    """One provider's line in this worker. The :class:`Pacer` calls its methods with the lock held.

    Slots belong to the line, so a due slot is for the message that has waited longest. A message
    that leaves the line with a slot is outstanding until its task begins, or until the message is
    settled, lost, or in line again. The number of outstanding messages is limited, and the line
    takes no slots beyond this limit. So a worker whose tasks do not begin leaves slots to other
    workers.

    If ``fleet`` gives the slots, all workers share them. While the store is away, the worker makes
    its own slots, at its share of the rate. The worker goes on with its own slots until all workers
    have noticed that the store is back.

    Arguments:
        name: the provider's name, for the log.
        rate: agreed calls a second; ``None``: no rate is agreed.
        fleet: gives slots that workers share. ``None``: each worker has the rate for itself.
        gate: says how many of the waiting messages may start now.
        hide: hides a message until a time. Must not block.
        rng: draws when this worker begins to use its own slots, and when some messages return.
    """

    def __init__(
        self,
        name: str,
        rate: float | None,
        fleet: FleetSlots | None,
        gate: ProviderGate,
        hide: Callable[[Lease, float], object],
        rng: random.Random,
    ) -> None:
        self._name = name
        self.has_rate = rate is not None
        self._rate = (rate or 0.0) * HEADROOM
        self.fleet = fleet
        self._gate, self._hide, self._rng = gate, hide, rng
        #: For each message: the call that starts it, the longest time that it may wait here, and
        #: the longest time that it may be hidden, both in seconds.
        self.line: dict[Lease, tuple[Callable[[], object], float, float]] = {}
        #: Messages to hide for which no time of return is chosen yet. Each comes with the longest
        #: time in seconds that it may be hidden.
        self._to_hide: dict[Lease, float] = {}
        #: For each message to hide that has a time of return: the call that hides it until then.
        self._hiding: list[Callable[[], object]] = []
        self._slots: list[float] = []
        #: The messages that have left the line with a slot, and whose tasks have not begun. Each
        #: comes with the time when it left the line.
        self._outstanding: dict[Lease, float] = {}
        self._last_slot = -math.inf
        self._workers, self._told_at = _WORKERS_UNKNOWN, -math.inf
        self._times = Times()
        #: Until this time, the worker makes its own slots. Infinity: until the store answers.
        self._apart_until = -math.inf
        self._ask_at = -math.inf

    def __len__(self) -> int:
        return len(self.line) + len(self._to_hide) + len(self._hiding)

    @property
    def is_idle(self) -> bool:
        """Whether no message waits here, and no message is outstanding."""
        return not len(self) and not self._outstanding

    @property
    def is_away(self) -> bool:
        """Whether the worker uses its own slots until the store answers again."""
        return self._apart_until == math.inf

    def is_stuck(self, now: float) -> bool:
        """Return whether the line takes no slots, because messages with slots wait for a process.

        Call this with the lock.
        """
        is_full = self.has_rate and self._room <= 0
        return is_full and now - min(self._outstanding.values()) > _STUCK_SECONDS

    @property
    def _share(self) -> float:
        """The slots a second of this worker, if all workers take equal shares."""
        return self._rate if self.fleet is None else self._rate / self._workers

    @property
    def _room(self) -> int:
        """The number of further messages that may be outstanding. It may be negative."""
        return math.ceil(_OUTSTANDING_SECONDS * self._share) - len(self._outstanding)

    # Slots are given

    def find_wanted(self, now: float) -> tuple[int, dict[Lease, float]]:
        """Update the line. Return how many more slots it needs now, and the messages to hide.

        Settled messages leave the line. A message that would wait here for too long leaves the
        line, too, and must be hidden. The result has all messages to hide that have no time of
        return yet, each with the longest time in seconds that it may be hidden.
        """
        if now >= self._apart_until > -math.inf:  # all workers take slots from the store again
            self._apart_until = -math.inf
            self._slots.clear()
        for lease in [each for each in self.line if each.is_settled()]:
            del self.line[lease]
        if not self.has_rate:
            return 0, {}
        for lease in list(self._outstanding):
            if not lease.has_turn or lease.is_settled():
                del self._outstanding[lease]
        wait = max(0.0, self._times.free_at - now)
        for lease, (_, longest, hold) in list(self.line.items())[len(self._slots) :]:
            if wait > longest:
                del self.line[lease]
                self._to_hide[lease] = hold
            else:
                wait += 1 / (self._share if now < self._apart_until else self._rate)
        is_near = self._times.free_at <= now + AHEAD_SECONDS
        lacking = min(len(self.line), self._room) - len(self._slots) if is_near else 0
        return max(0, lacking), dict(self._to_hide)

    def needs_store(self, now: float) -> bool:
        """Return whether to ask the store for slots now.

        If this worker makes its own slots now, first give own slots and times of return to the
        line. While the store is away, ask it from time to time, to notice its return.
        """
        slots, hide = self.find_wanted(now)
        is_apart = self.fleet is None or now < self._apart_until
        if is_apart and (slots or hide):
            own = self._times.take_slots(slots, now, self._share)
            self._slots = sorted([*self._slots, *own])
            self._give_returns(
                hide, self._times.take_returns([*hide.values()], now, self._share), now
            )
        is_asked = self.is_away if is_apart else bool(slots or hide)
        return is_asked and now >= self._ask_at

    def give_shared(self, hide: Iterable[Lease], taken: Taken, now: float) -> None:
        """Give the line the slots in an answer of the store.

        If the answer is late, the times of several slots may be over already. The line spaces these
        slots out. If it used them all at once, while other workers use their own slots, the calls
        would exceed the agreed rate.

        Arguments:
            hide: the messages to hide, as they were in the request.
            taken: the store's answer.
            now: the time in seconds.
        """
        for slot in taken.slots:
            self._last_slot = max(slot, now, self._last_slot + 1 / self._rate)
            self._slots.append(self._last_slot)
        self._give_returns(hide, taken.returns, now)
        if self.is_away:
            name = printable(self._name)
            logger.info("sqs_backoff.rate_shared_again: %s: the store answers", name)
        elif now < taken.apart_until:
            self._begin_own(now)
        else:
            self._times, self._workers, self._told_at = taken.times, taken.workers, now
            self._ask_at = now + _ASK_SECONDS
            return
        self._apart_until = taken.apart_until
        # Perhaps some workers have not asked the store since its return. So the store's count of
        # workers may be too low.
        self._workers = max(self._workers, taken.workers)

    def _give_returns(
        self, hide: Iterable[Lease], returns: Iterable[float | None], now: float
    ) -> None:
        """Hide messages until their times of return.

        ``None`` as the time of return means that the next free time of return is later than the
        message may be hidden. Such a message comes back at a random earlier time, and then waits
        for a slot again.
        """
        for lease, at in zip(hide, returns, strict=True):
            if (hold := self._to_hide.pop(lease, None)) is not None:
                at = now + self._rng.uniform(0.5, 1.0) * hold if at is None else at
                self._hiding.append(partial(self._hide, lease, at))

    def note_away(self, why: str, asked_at: float, now: float) -> None:
        """Go on with this worker's own slots, because the store does not answer.

        Arguments:
            why: the reason, for the log.
            asked_at: when the worker asked the store. The last slots from earlier answers are at
                most ``AHEAD_SECONDS`` later.
            now: the time in seconds.
        """
        self._ask_at = now + _AWAY_SECONDS
        if self.is_away:
            return
        if now > self._told_at + present_seconds(self._rate):
            self._workers = max(self._workers, _WORKERS_UNKNOWN)
        self._begin_own(asked_at)
        self._apart_until = math.inf
        logger.warning(
            "sqs_backoff.rate_store_away: %s: %s; this worker makes calls at 1/%d of the agreed"
            " rate until the store answers",
            printable(self._name),
            printable(why),
            self._workers,
        )

    def _begin_own(self, since: float) -> None:
        """Let this worker's own slots begin after the last slots from the store.

        The first own slot is at a random time. Otherwise all workers would call at the same
        moments.
        """
        first = since + AHEAD_SECONDS + self._rng.uniform(0, 1 / self._share)
        self._times = Times(first, self._times.back_at)

    # Messages leave

    def depart(self, now: float) -> list[Callable[[], object]]:
        """Take out the messages to start or hide now. Return the calls that start or hide them."""
        actions, self._hiding = self._hiding, []
        self._slots = [slot for slot in self._slots if slot >= now - LATEST_SECONDS]
        ready = len(self.line)
        if self.has_rate:
            ready = min(ready, sum(slot <= now for slot in self._slots))
        for lease in list(self.line)[: self._gate.turns(ready, now) if ready else 0]:
            start = self.line.pop(lease)[0]
            lease.has_turn = True
            if self.has_rate:
                self._slots.pop(0)
                self._outstanding[lease] = now
            actions.append(start)
        if not self.line:
            self._slots.clear()
        return actions

    def next_at(self, now: float) -> float:
        """Return when to check the line again."""
        turn = self._gate.rate.seconds_to_turn(now)
        if not self.has_rate:
            return now + min(_LONGEST_TURN_SECONDS, turn)
        return min([now + _LOOK_SECONDS, *(slot for slot in self._slots if slot > now)])


class Pacer:
    """The lines of a worker, and the two threads that serve them.

    The threads start when the first message is in line, or at the first :meth:`look_soon`.

    Arguments:
        clock: returns monotonic seconds.
        lock: the lock of the gates.
        look: brings hidden messages forward. Returns the seconds until its next call, or ``None``
            to wait for :meth:`look_soon`.
    """

    def __init__(
        self, clock: Callable[[], float], lock: threading.RLock, look: Callable[[], float | None]
    ) -> None:
        self._clock, self._lock, self._look = clock, lock, look
        self._look_at = math.inf
        self._changed = threading.Condition(self._lock)
        self._wanted = threading.Condition(self._lock)
        self._busy: dict[Pace, None] = {}
        #: The lines that wait for a store's answer, each with the time of its request.
        self._asked: dict[Pace, float] = {}
        self._threads: list[threading.Thread] = []
        self._is_stopping = False

    def join(
        self,
        pace: Pace,
        lease: Lease,
        start: Callable[[], object],
        longest: float,
        hold: float,
    ) -> None:
        """Put a message in line. It may start as soon as its turn comes. Does not block.

        Arguments:
            pace: the provider's line.
            lease: the message.
            start: starts the message. The thread ``sqs-pace`` calls it. Must not block.
            longest: the longest time in seconds that the message may wait here. If its slot is
                later, the message is hidden.
            hold: the longest time in seconds that the message may be hidden.
        """
        with self._lock:
            pace.line[lease] = start, longest, min(hold, _LONGEST_RETURN_SECONDS)
            self._busy[pace] = None
            self._start_threads()
            self._changed.notify()

    def look_soon(self) -> None:
        """Let the thread ``sqs-pace`` search for messages to bring forward. Does not block."""
        with self._lock:
            self._look_at = -math.inf
            self._start_threads()
            self._changed.notify()

    def stop(self) -> None:
        """End the threads. The keeper later gives the messages in line back to SQS."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
            self._wanted.notify_all()

    def fault(self) -> str | None:
        """Return a text about a thread that has died, or ``None``. The lines need both threads.

        The heartbeat calls this and must not block, so this method does not take the lock.
        """
        dead = [thread.name for thread in tuple(self._threads) if not thread.is_alive()]
        return f"the thread {dead[0]} has died" if dead and not self._is_stopping else None

    def _start_threads(self) -> None:
        if self._is_stopping:
            return
        wanted = (("sqs-pace", self._pace), ("sqs-slots", self._ask_stores))
        for name, run in wanted[len(self._threads) :]:
            thread = start_daemon(name, run)
            if thread is None:
                logger.warning(
                    "sqs_backoff.no_thread_left: messages of tasks with a provider wait until a"
                    " thread can start"
                )
                return
            self._threads.append(thread)

    # The thread sqs-pace starts or hides messages

    def _pace(self) -> None:
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                now = self._clock()
                actions = self.step(now)
                if not actions:
                    next_at = min([self._look_at, *(pace.next_at(now) for pace in self._busy)])
                    self._changed.wait(None if next_at == math.inf else max(0.001, next_at - now))
                    continue
            for action in actions:
                try:
                    action()
                except Exception as exc:  # noqa: BLE001
                    # This is a bug. Do not end the thread, because the other messages still need
                    # it.
                    logger.error("sqs_backoff.pacing_failed: %s", error_site(exc, calls=BUG_CALLS))

    def step(self, now: float) -> list[Callable[[], object]]:
        """Give the lines slots that need no store, and queue requests for slots from stores.

        Return the calls that start or hide messages now, or search for messages to bring forward.
        """
        actions: list[Callable[[], object]] = []
        with self._lock:
            for pace in list(self._busy):
                since = self._asked.get(pace)
                if since is not None and not pace.is_away and now >= since + _PATIENCE_SECONDS:
                    pace.note_away("no answer", since, now)
                if pace.needs_store(now) and since is None:
                    self._asked[pace] = now
                    self._wanted.notify()
                actions += pace.depart(now)
                if pace.is_idle:
                    del self._busy[pace]
            if now >= self._look_at:
                self._look_at = now + _AFTER_FAULT_SECONDS
                actions.append(self._look_now)
        return actions

    def _look_now(self) -> None:
        seconds = self._look()
        with self._lock:
            if self._look_at > -math.inf:  # else ``look_soon`` has asked for another search
                self._look_at = math.inf if seconds is None else self._clock() + seconds

    # The thread sqs-slots: it asks stores for slots

    def _ask_stores(self) -> None:
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                if not self._asked:
                    self._wanted.wait()
                    continue
                pace = next(iter(self._asked))
            self.ask(pace)

    def ask(self, pace: Pace) -> None:
        """Ask the store for slots for a line, and give them to the line. Wait for the store."""
        assert pace.fleet is not None
        with self._lock:
            asked_at, is_back = self._clock(), pace.is_away
            slots, hide = (0, {}) if is_back else pace.find_wanted(asked_at)
        taken, why = None, "a late answer"
        try:
            taken = pace.fleet.take(slots, [*hide.values()], is_back=is_back)
        except Exception as exc:  # noqa: BLE001
            # The store's client may raise any exception. The messages must go on without the store.
            why = type(exc).__name__
        with self._lock:
            now, since = self._clock(), self._asked.pop(pace)
            is_late = now - asked_at > _PATIENCE_SECONDS or pace.is_away is not is_back
            if taken is None or is_late:  # after a late answer, the next answer may be late, too
                pace.note_away(why, since, now)
            else:
                pace.give_shared(hide, taken, now)
            self._changed.notify()
