"""One provider as one worker sees it: gate, recall and the rate of its recovery in one object.

The worker and the simulator ask the same questions of it:

* ``look``: a message has come due; does it run, or wait, or is it hidden, and for how long?
* ``turns``: how many of those that wait may run now?
* ``ended``: a run is over; ``abandoned``: a message that was let through has not run.
* ``delay_after_failure``: how long is a message hidden that has failed?
* ``keeps_its_delay``: a message has failed three times since the provider is back. Perhaps it
  always does: back at once each time, it would run, and cut the rate, all the time.
* ``hidden``: SQS has confirmed that a message is hidden; ``gone``: it is no longer ours.
* ``recalls``: which messages to bring forward now.
* ``hand_over``: the worker stops; which messages are to come back soon, for other workers.

Pure: times and randomness are passed in, and nothing is called but ``on_event``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from ..retry.outcomes import Outcome
from ..retry.policies import Policy, RandomSource
from .admission import Admission
from .handover import Nearer, nearer
from .health import Change, Health, Permission, State, Thresholds
from .recall import DEFAULT_LIMIT, Hidden, Memory

__all__ = ["Control", "Event", "Look", "Notice"]

#: A message that can be recalled is hidden for its policy's longest delay, later for about
#: ``HOLD_FACTOR`` times the outage so far, and for ``LONGEST_HOLD_SECONDS`` at most: if its worker
#: is killed it comes back by then. Drawn from the upper quarter, so that those hidden together do
#: not return together.
HOLD_FACTOR = 2.0
LONGEST_HOLD_SECONDS = 1800.0
MANY_FAILURES = 1000

#: A message that has come due so often waits in its worker for longer while the provider recovers:
#: each look costs one of the queue's receives.
MANY_LOOKS = 4
LONGEST_WAIT_SECONDS = 60.0
HOLD_JITTER_FROM = 0.75

#: A message without a token, while the provider recovers, waits behind those remembered already.
#: Not for longer than two hours: the rate is low at first, and the worker that remembers the
#: message may be gone by then. Simulated over 12 h: without this bound one of five fleets took 2.8
#: times the shortest time, with half an hour 1.6 times, with two hours 1.08 times.
SHORTEST_QUEUE_SECONDS, LONGEST_QUEUE_SECONDS = 30.0, 7200.0

#: A message that fails while the provider recovers comes back soon: the rate decides when it runs.
#: With its policy's delay, the last messages that were refused would run long after all others.
#: After so many seconds for each of its receives, and twice in each worker: perhaps it always
#: fails.
SOON_SECONDS = 0.5
SOON_TIMES = 2

#: How long to wait for a message that comes due by itself before one is recalled to probe with.
PROBE_GRACE_SECONDS = 2.0

#: Between two looks at what to bring forward: while the provider recovers, and while it is down.
RECOVERY_LOOK_SECONDS = 0.25
OUTAGE_LOOK_SECONDS = 1.0

#: Our own recalls, and runs under way, that are kept in mind.
_MOST_KEPT = 10_000


T = TypeVar("T")


class Event(Enum):
    """What a worker reports about a provider. The value is the name in logs and signals."""

    SLOWED = "slowed"
    OPENED = "opened"
    PROBING = "probing"
    CLOSED = "closed"
    RECOVERED = "recovered"
    RECALLED = "recalled"


@dataclass(frozen=True, slots=True)
class Notice:
    """What has happened to a provider in this worker.

    Attributes:
        event: what.
        messages: RECALLED: how many are brought forward now; CLOSED: how many will be.
    """

    event: Event
    messages: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """What becomes of a message that has come due.

    Attributes:
        hide_seconds: hide it for this long without running it; ``None`` = run it.
        is_probe: it runs as the one probe.
        waits: it is kept until ``turns`` counts it, and runs then.
    """

    hide_seconds: float | None = None
    is_probe: bool = False
    waits: bool = False

    @property
    def runs(self) -> bool:
        return self.hide_seconds is None and not self.waits


_RUN = Look()
_PROBE = Look(is_probe=True)
_WAIT = Look(waits=True)


def _ignore(notice: Notice) -> None:
    pass


class Control:
    """Gate, recall and recovery of one provider in one worker. Not safe for threads by itself.

    Args:
        thresholds: of the gate.
        rng: draws intervals and delays.
        limit: most hidden messages to remember; 0 = recall nothing.
        on_event: is told of each event.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        rng: RandomSource,
        *,
        limit: int = DEFAULT_LIMIT,
        on_event: Callable[[Notice], None] = _ignore,
    ) -> None:
        self.health = Health(thresholds, rng)
        self.memory = Memory(limit)
        self.admission = Admission()
        self._recalls = limit > 0
        self._rng = rng
        self._on_event = on_event
        self._began: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._recalled_probe_at = 0.0

    def look(
        self,
        message_id: str,
        now: float,
        *,
        policy: Policy,
        looks: int,
        longest: float,
        ahead: int,
        longest_wait: float,
        recallable: bool = True,
        is_last: bool = False,
    ) -> Look:
        """Decide about a message that has come due.

        Args:
            message_id: SQS's id. An older hold of it is forgotten.
            now: seconds, as in all calls.
            policy: draws the delay if the message cannot be recalled.
            looks: how often the message has come due, 1 = the first time.
            longest: most seconds that it may be hidden (12 hours, retention, its budget).
            ahead: messages that wait for their turn already.
            longest_wait: most seconds that it may wait here while the provider recovers.
            recallable: whether it may be brought forward later; else its policy alone decides.
            is_last: it must not be hidden any more. It runs, as the probe if one is due.
        """
        self.memory.forget(message_id)
        recallable = recallable and self.memory.has_room(now)
        permission = self.health.allow(message_id, now)
        if permission is Permission.HIDE and not is_last:
            if recallable:
                return Look(self._hold(now, policy, longest))
            to_probe = max(0.0, self.health.next_probe_at - now)
            return Look(self._by_policy(to_probe, message_id, policy, looks, longest))
        if permission is Permission.PROBE:
            self._on_event(Notice(Event.PROBING))
        elif self.admission.is_limiting and (ahead or not self.admission.admit(1, now)):
            to_turn = self.admission.seconds_to_turn(ahead, now)
            may_stay = looks >= MANY_LOOKS and not is_last
            if to_turn <= min(LONGEST_WAIT_SECONDS if may_stay else longest_wait, longest):
                return _WAIT
            if not is_last:
                if recallable:
                    return Look(self._queue(to_turn, longest))
                return Look(self._by_policy(to_turn, message_id, policy, looks, longest))
        _put(self._began, message_id, now)
        return _PROBE if permission is Permission.PROBE else _RUN

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of the messages that wait may run now, those that came first.

        All, once nothing limits them; the gate may have opened again: let each be looked at.
        """
        return self.admission.admit(waiting, now) if self.admission.is_limiting else waiting

    def ended(
        self,
        message_id: str,
        outcome: Outcome | None,
        now: float,
        *,
        retry_after: float | None = None,
    ) -> None:
        """Note how a run ended; ``None`` = it succeeded."""
        began = self._began.pop(message_id, now)
        if outcome is None:
            self.admission.succeeded(now)
        elif outcome is Outcome.RETRYABLE:
            self.admission.refused(began, now)
            if self.admission.is_limiting:
                _put(self._failures, message_id, self._failures.get(message_id, 0) + 1)
        slowed = self.admission.is_limiting if self._recalls else None
        changed = self.health.record(
            message_id, outcome, now, retry_after=retry_after, is_slowed=slowed
        )
        if changed is Change.OPENED:
            self._opened()
        elif changed is Change.CLOSED:
            self._closed(now)
        elif changed is Change.SLOWED:
            self.admission.start(now)
            self._on_event(Notice(Event.SLOWED))

    def delay_after_failure(
        self,
        message_id: str,
        delay: float,
        now: float,
        *,
        floor: float,
        policy: Policy,
        looks: int,
        longest: float,
        recallable: bool = True,
    ) -> float:
        """Return how long to hide a message that has failed, instead of ``delay``.

        Longer while the gate is open: it would not run earlier. Shorter while the provider
        recovers, but no less than ``floor``. Ask after ``ended``.
        """
        if not recallable:
            return delay
        if self.health.state is not State.CLOSED:
            has_room = self.memory.has_room(now)
            return max(delay, self._hold(now, policy, longest)) if has_room else delay
        comes_soon = self.admission.is_limiting and not self.keeps_its_delay(message_id)
        return min(delay, max(floor, SOON_SECONDS * looks)) if comes_soon else delay

    def keeps_its_delay(self, message_id: str) -> bool:
        """Return whether a message that has just failed is not to come back early."""
        return self.health.state is State.CLOSED and self._failures.get(message_id, 0) > SOON_TIMES

    def abandoned(self, message_id: str, now: float) -> None:
        """Note that a message that was let through has not run (revoked, given back)."""
        self._began.pop(message_id, None)
        self.health.abandon(message_id, now)

    def hidden(self, hidden: Hidden, now: float) -> bool:
        """Remember a message that SQS has confirmed as hidden; return whether it is kept."""
        return self.memory.remember(hidden, now)

    def gone(self, message_id: str) -> None:
        """Forget a message: settled, or its hold is in doubt."""
        self.memory.forget(message_id)

    def recalls(self, now: float, *, room: int, waiting: int = 0) -> list[Hidden]:
        """Take out the messages to bring forward now; empty = none.

        Args:
            now: seconds.
            room: most messages that the worker has processes for.
            waiting: messages that wait for their turn; nothing is brought forward behind many.
        """
        if self.health.state is not State.CLOSED:
            return self._probe_recall(now) if self.health.needs_probe(now) else []
        if not self.admission.is_limiting:
            return []
        remembered = self.memory.waiting(now)
        if not remembered:
            if self.admission.is_calm(now) and not self.memory.is_worth_waiting:
                self.admission.stop()
                self._on_event(Notice(Event.RECOVERED))
            return []
        most = 0 if self.admission.is_behind(waiting) else min(remembered, room)
        taken = self.memory.take(self.admission.recall(most, now), now)
        if taken:
            self._on_event(Notice(Event.RECALLED, len(taken)))
        return taken

    def hand_over(self, now: float) -> list[Nearer]:
        """Take out what is to come back soon because this worker stops; the furthest due first."""
        if self.is_quiet:  # each message waits for its own delay
            return []
        is_down = self.health.state is not State.CLOSED
        return nearer(self.memory.take_all(now), now, self._rng, is_down=is_down)

    def told_open(self, opened_at: float, next_probe_at: float) -> None:
        """Open the gate for an outage that began earlier."""
        self.health.told_open(opened_at, next_probe_at)
        self._opened()

    def look_quietly(self, message_id: str, now: float) -> None:
        """Note the start of a run that nothing limits; as ``look``, but cheaper."""
        self.memory.forget(message_id)
        _put(self._began, message_id, now)

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing would come of asking ``recalls`` now or later."""
        return self.health.state is State.CLOSED and not self.admission.is_limiting

    @property
    def seconds_to_look(self) -> float | None:
        """Return the pause before ``recalls`` is worth asking; ``None`` = nothing would come of it.

        It is shorter from the moment at which the gate closes.
        """
        if self.is_quiet:
            return None
        return RECOVERY_LOOK_SECONDS if self.admission.is_limiting else OUTAGE_LOOK_SECONDS

    def _opened(self) -> None:
        self.admission.stop()
        self._on_event(Notice(Event.OPENED))

    def _closed(self, now: float) -> None:
        self._failures.clear()
        if self._recalls:
            self.admission.start(now)
        self._on_event(Notice(Event.CLOSED, self.memory.count(now)))

    def _probe_recall(self, now: float) -> list[Hidden]:
        due_at = self.health.next_probe_at
        if now < max(due_at, self._recalled_probe_at) + PROBE_GRACE_SECONDS:
            return []
        self._recalled_probe_at = now
        return self.memory.take_next(1, now)

    def _hold(self, now: float, policy: Policy, longest: float) -> float:
        """Seconds to hide a message while the gate is open: recall will bring it forward."""
        hold = _longest_hold(now - self.health.opened_at, policy)
        return min(hold, longest) * self._rng.uniform(HOLD_JITTER_FROM, 1.0)

    def _queue(self, to_turn: float, longest: float) -> float:
        """Seconds to hide a message that found no room while the provider recovers."""
        turn = (len(self.memory) + 1) / self.admission.rate
        hold = min(max(SHORTEST_QUEUE_SECONDS, HOLD_FACTOR * turn), LONGEST_QUEUE_SECONDS)
        return min(max(to_turn, hold), longest)

    def _by_policy(
        self, seconds: float, message_id: str, policy: Policy, looks: int, longest: float
    ) -> float:
        """Seconds to hide a message that cannot be recalled: its own delay begins after these."""
        return min(longest, seconds + policy.delay_for(message_id, looks, self._rng))


def _longest_hold(outage: float, policy: Policy) -> float:
    """Most seconds to hide a message for that can be recalled, so long after the gate opened."""
    return min(max(policy.ceiling(MANY_FAILURES), HOLD_FACTOR * outage), LONGEST_HOLD_SECONDS)


def _put(kept: dict[str, T], key: str, value: T) -> None:
    if len(kept) >= _MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value
