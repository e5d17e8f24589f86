"""Is the provider up? A circuit breaker in two questions: may this message run, and how did it end?

Pure: times and randomness are passed in, nothing is called. Each worker has one per provider (and
tenant). States and transitions:

| state | event | next state |
|---|---|---|
| closed | ``failures`` in a row, of two messages or more | open, or slowed first |
| open | a message comes due after the next probe's time | probing (that message is the probe) |
| open | a call that began before the gate opened succeeds | open, with a probe due at once |
| probing | the probe succeeds | closed |
| probing | the probe does not succeed, or does not run | open, with a probe due later |
| probing | no end in ``PROBE_EXPIRES_AFTER_SECONDS`` | open, with a probe due at once |
| any | UNKNOWN or NOT_PROCESSED of any other message | no change |

A provider that refuses calls beside others that it takes, or that says in a failure when to come
back (Retry-After), may be up, and called too often: above all by a worker that has just started
among others. It is slowed first: a rate limits the calls (``provider.admission``), and each failure
cuts it. Only a provider that takes no call at all is down: the gate opens if nothing has succeeded
for as long as it would wait for its first probe. So it is, too, while the provider recovers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ..retry.outcomes import Outcome
from ..retry.policies import RandomSource

__all__ = ["Change", "Health", "Permission", "State", "Thresholds"]

#: A probe whose end nobody reports (its worker process vanished) does not keep the gate open.
PROBE_EXPIRES_AFTER_SECONDS = 600.0

#: Longest pause that a provider's Retry-After can put between two probes.
LONGEST_RETRY_AFTER_SECONDS = 3600.0

#: Failures of one message may be the message's own.
MESSAGES = 2

#: The pause between two probes is this share of the outage so far: so the end of an outage is
#: noticed within a sixth of its length, and the number of probes grows with its logarithm.
PAUSE_SHARE = 1 / 6

#: An interval is drawn between these shares of itself, so that the probes of a fleet spread.
JITTER_FROM, JITTER_TO = 0.75, 1.25


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Change(Enum):
    """What the end of a run has changed."""

    OPENED = "opened"
    CLOSED = "closed"
    #: The gate stays closed; from now on a rate is to limit the calls.
    SLOWED = "slowed"


class Permission(Enum):
    """What to do with a message that has come due."""

    RUN = "run"
    PROBE = "probe"
    HIDE = "hide"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the gate opens, and how often it probes. Times are seconds.

    Attributes:
        failures: in a row, of two messages or more, that open the gate.
        probe_interval: mean pause before the first probe, and shortest before any other.
        longest_probe_interval: the mean pause grows up to this.
    """

    failures: int = 6
    probe_interval: float = 5.0
    longest_probe_interval: float = 60.0


class Health:
    """The state of one provider as one worker sees it. Not safe for threads by itself."""

    def __init__(self, thresholds: Thresholds, rng: RandomSource) -> None:
        self.thresholds = thresholds
        self.state = State.CLOSED
        #: When the gate opened and when the next probe may start; meaningless while closed.
        self.opened_at = 0.0
        self.next_probe_at = 0.0
        self._rng = rng
        self._succeeded_at = self._slowed_at = -math.inf
        self._probe: str | None = None
        self._probe_began = 0.0
        self._in_a_row = 0
        self._failed: set[str] = set()

    def allow(self, message_id: str, now: float) -> Permission:
        """Say whether a message that has come due may run. PROBE makes it the one probe."""
        if self.state is State.CLOSED:
            return Permission.RUN
        self._expire_probe(now)
        if self.state is State.PROBING:
            return Permission.PROBE if message_id == self._probe else Permission.HIDE
        if not self.needs_probe(now):
            return Permission.HIDE
        self.state = State.PROBING
        self._probe = message_id
        self._probe_began = now
        return Permission.PROBE

    def record(
        self,
        message_id: str,
        outcome: Outcome | None,
        now: float,
        *,
        retry_after: float | None = None,
        is_slowed: bool | None = None,
    ) -> Change | None:
        """Note how a run ended; return what that has changed.

        Args:
            message_id: the message that ran.
            outcome: of its failure; ``None`` = it succeeded.
            now: seconds of any clock, the same for all calls.
            retry_after: seconds that the provider asked to be left alone.
            is_slowed: a rate limits the calls, and this failure has cut it; ``None`` = none can.
        """
        if outcome is None:
            self._succeeded_at = now
        if self.state is State.PROBING and message_id == self._probe:
            if outcome is None:
                self._close()
                return Change.CLOSED
            self._open(now, retry_after)
        elif self.state is State.CLOSED:
            if not self._have_enough_failed(message_id, outcome):
                return None
            if is_slowed is not None and self._may_be_up(now, retry_after, is_slowed):
                if is_slowed:
                    return None
                self._slowed_at = now
                return Change.SLOWED
            self.opened_at = now
            self._open(now, retry_after)
            return Change.OPENED
        elif outcome is None:  # begun before the gate opened, and answered since
            self.next_probe_at = min(self.next_probe_at, now)
        return None

    def abandon(self, message_id: str, now: float) -> None:
        """Note that a message that was let through has not run; as a probe it is replaced."""
        if self.state is State.PROBING and message_id == self._probe:
            self._open(now, None)

    def needs_probe(self, now: float) -> bool:
        """Return whether the gate is open and waits for a message to probe with."""
        self._expire_probe(now)
        return self.state is State.OPEN and now >= self.next_probe_at

    def told_open(self, opened_at: float, next_probe_at: float) -> None:
        """Open the gate for an outage that began earlier."""
        self.state, self._probe = State.OPEN, None
        self.opened_at, self.next_probe_at = opened_at, next_probe_at

    def _expire_probe(self, now: float) -> None:
        if self.state is State.PROBING and (now - self._probe_began >= PROBE_EXPIRES_AFTER_SECONDS):
            self.state, self._probe = State.OPEN, None
            self.next_probe_at = now

    def _have_enough_failed(self, message_id: str, outcome: Outcome | None) -> bool:
        """Note how a run ended; return whether enough have failed in a row."""
        if outcome is None:
            self._forget_failures()
        elif outcome is Outcome.RETRYABLE:
            self._in_a_row += 1
            if len(self._failed) < MESSAGES:
                self._failed.add(message_id)
            return self._in_a_row >= self.thresholds.failures and len(self._failed) == MESSAGES
        return False

    def _forget_failures(self) -> None:
        self._in_a_row = 0
        self._failed.clear()

    def _may_be_up(self, now: float, retry_after: float | None, is_slowed: bool) -> bool:
        """Whether it may be up, although enough calls have failed."""
        last = max(self._succeeded_at, self._slowed_at)
        is_recent = now < last + self.thresholds.probe_interval
        return is_recent or (retry_after is not None and not is_slowed)

    def _close(self) -> None:
        self.state, self._probe = State.CLOSED, None
        self._forget_failures()

    def _open(self, now: float, retry_after: float | None) -> None:
        self.state, self._probe = State.OPEN, None
        limits = self.thresholds
        mean = max(limits.probe_interval, PAUSE_SHARE * (now - self.opened_at))
        pause = min(mean, limits.longest_probe_interval) * self._rng.uniform(JITTER_FROM, JITTER_TO)
        floor = min(retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS)
        self.next_probe_at = now + max(pause, floor)
