"""How the simulated provider answers a call."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .measures import Call
from .scenario import Phase, Script

__all__ = ["Answer", "Provider"]


@dataclass(frozen=True, slots=True)
class Answer:
    reply: Call
    seconds: float
    retry_after: float | None = None


class Provider:
    """Answers calls as its script says. Calls must come in the order of time."""

    def __init__(self, script: Script, rng: Random) -> None:
        self._script = script
        self._rng = rng
        self._phases = list(reversed(script.phases))
        self._phase: Phase | None = None
        self._changes_at = 0.0
        self._tokens = 0.0
        self._filled_at = 0.0
        self._sent = Answer(Call.SENT, script.call_seconds)
        self._down = Answer(Call.WASTED, script.failed_call_seconds)
        self._capacity: float | None = None
        self._enter(0.0)
        self._tokens = self._burst()

    def call(self, now: float) -> Answer:
        """Answer one call that begins now."""
        if now >= self._changes_at:
            self._enter(now)
        phase = self._phase
        if phase is not None:
            failing = phase.share_failing
            if failing and (failing >= 1 or self._rng.random() < failing):
                return self._down
        if self._capacity is not None and not self._takes(now):
            return Answer(Call.TURNED_AWAY, self._sent.seconds, self._script.retry_after)
        return self._sent

    def _takes(self, now: float) -> bool:
        assert self._capacity is not None
        self._tokens = min(self._burst(), self._tokens + (now - self._filled_at) * self._capacity)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _burst(self) -> float:
        burst = self._script.burst
        return max(1.0, (self._capacity or 1.0) if burst is None else burst)

    def _enter(self, now: float) -> None:
        """Find the phase of a time, and when it changes."""
        while self._phases and self._phases[-1].end <= now:
            self._phases.pop()
        upcoming = self._phases[-1] if self._phases else None
        phase = upcoming if upcoming is not None and upcoming.start <= now else None
        self._phase = phase
        if phase is not None:
            self._changes_at = phase.end
        else:
            self._changes_at = upcoming.start if upcoming is not None else float("inf")
        script = self._script
        own = phase.call_seconds if phase is not None else None
        self._sent = Answer(Call.SENT, script.call_seconds if own is None else own)
        self._down = Answer(Call.WASTED, script.failed_call_seconds if own is None else own)
        limit = phase.capacity if phase is not None else None
        self._capacity = script.capacity if limit is None else limit
