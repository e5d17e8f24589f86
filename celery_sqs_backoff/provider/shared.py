"""What workers tell each other of a provider's health, through one record in a store.

| this worker | the record | what happens |
|---|---|---|
| has opened, or its probe has failed | any | it writes when the next probe is |
| has closed by its own probe | any | it writes that the provider is back |
| closed | down, since this worker last heard that it is back | it opens |
| open | back, since it opened | it closes |
| open | down | it takes over when the next probe is |
| open | none: it has ended | it writes what it knows |

Who may probe is a second record, which one worker at a time creates, and which ends by itself.

The record's times are seconds since the epoch by the clock of the machine that is ahead of all
others: each worker that reads a later time than its own goes by that from then on (Lamport's rule).
So it never orders two events by clocks that differ. Pure: times are passed in.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from .control import Control
from .health import State

__all__ = ["PERMIT_SECONDS", "RECORD_SECONDS", "SharedHealth", "Word"]

#: A permit to probe ends by itself: its worker may have been killed, or receives nothing.
PERMIT_SECONDS = 60.0

#: A worker that has no message to probe with leaves the permit for so long to those that have one.
OTHERS_FIRST_SECONDS = 5.0

#: A record that nobody has renewed for so long says nothing.
RECORD_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Word:
    """What the record says.

    Attributes:
        is_open: the provider is down.
        at: since when; of one that is back: since when that is known.
        next_probe_at: when it is probed next.
        written_at: when it was written.
    """

    is_open: bool
    at: float
    next_probe_at: float = 0.0
    written_at: float = field(default=0.0, compare=False)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | None) -> Word | None:
        return None if text is None else cls(**json.loads(text))


_NEVER = Word(False, 0.0)


class SharedHealth:
    """One provider between this worker and the record. Not safe for threads by itself."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.health = control.health
        self._seen = self._offered = self._snapshot()
        self._heard_back_at = 0.0
        self._ahead = -math.inf
        self.has_permit = False
        self._permitted_at = self._returned_at = 0.0

    def look(self, word: Word | None, now: float, today: float) -> Word | None:
        """Take over what the record says; return what to write instead, ``None`` = nothing.

        What is returned is returned again until :meth:`written`.

        Args:
            word: what the record says; ``None`` = there is none.
            now: seconds, by the clock of the control.
            today: the same moment in seconds since the epoch, by this machine's clock.
        """
        is_open, opened_at, next_probe_at = here = self._offered = self._snapshot()
        ahead = self._ahead = max(self._ahead, today - now, (word or _NEVER).written_at - now)
        today = now + ahead
        has_changed = here != self._seen
        if not is_open:
            if has_changed:
                return Word(False, today, written_at=today)
            if word is not None and word.is_open and word.at > self._heard_back_at:
                self._control.told_open(word.at - ahead, word.next_probe_at - ahead)
                self._seen = self._snapshot()
            return None
        if has_changed or word is None:
            return Word(True, opened_at + ahead, next_probe_at + ahead, today)
        if word.is_open:
            self._control.told_open(opened_at, word.next_probe_at - ahead)
            self._seen = self._snapshot()
        elif word.at > opened_at + ahead:
            self._heard_back_at = word.at
            self._control.told_closed(now)
            self._seen = self._snapshot()
        return None

    def written(self, word: Word) -> None:
        """Note that the record says what ``look`` has returned."""
        self._seen = self._offered
        if not word.is_open:
            self._heard_back_at = word.at

    def wants_permit(self, now: float) -> bool:
        """Return whether this worker is to ask for the permit to probe."""
        health = self.health
        return health.wants_permit(now) and (
            self._control.memory.has_next(now)
            or now >= max(health.next_probe_at, self._returned_at) + OTHERS_FIRST_SECONDS
        )

    def permitted(self, asked_at: float) -> None:
        """Note that this worker has the permit."""
        self.has_permit, self._permitted_at = True, asked_at
        self.health.permit_until = asked_at + PERMIT_SECONDS

    def gives_permit_back(self, now: float) -> bool:
        """Return whether this worker's permit has served, or cannot: it has nothing to probe with.

        It is not this worker's any more then.
        """
        if not self.has_permit:
            return False
        health = self.health
        is_of_use = health.state is State.PROBING or self._control.memory.has_next(now)
        if not is_of_use and now >= self._permitted_at + OTHERS_FIRST_SECONDS:
            health.permit_until = -math.inf
            self._returned_at = now
        self.has_permit = health.permit_until != -math.inf
        return not self.has_permit

    def _snapshot(self) -> tuple[bool, float, float]:
        health = self.health
        is_open = health.state is not State.CLOSED
        return (is_open, health.opened_at, health.next_probe_at) if is_open else (False, 0.0, 0.0)
