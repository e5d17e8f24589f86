"""The counts of a run while it runs, and how fast it is."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from .events import Event, Progress
from .report import Ended, RedriveReport

__all__ = ["Tally"]

#: The speed that is told is that of the last so many seconds.
_WINDOW_SECONDS = 5.0


class Tally:
    """Counts, and passes events on one at a time. Safe for threads."""

    def __init__(
        self, on_event: Callable[[Event], None] | None, clock: Callable[[], float]
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, count: str, messages: int = 1) -> None:
        with self._lock:
            self._counts[count] += messages

    def tell(self, event: Event, **counts: int) -> None:
        """Count (field of the report = how many), and hand out the event."""
        with self._lock:
            self._counts.update(counts)
            if self._on_event is not None:
                self._on_event(event)

    def __getitem__(self, count: str) -> int:
        return self._counts[count]

    @property
    def per_second(self) -> float:
        """Messages sent or dropped per second, lately."""
        with self._lock:
            now, done = self._clock(), self._counts["sent"] + self._counts["dropped"]
            while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW_SECONDS:
                self._marks.popleft()
            since, before = self._marks[0]
            if now - self._marks[-1][0] >= 0.5:
                self._marks.append((now, done))
            return (done - before) / max(0.1, now - since)

    def progress(self, *, looked_at: int, messages: int) -> None:
        rate = self.per_second
        left = max(0, messages - looked_at)
        self.tell(
            Progress(
                looked_at=looked_at,
                messages=messages,
                sent=self["sent"],
                failed=self["failed"],
                skipped=self["skipped"],
                poison=self["poison"],
                returned=self["returned"],
                rate=rate,
                eta_seconds=left / rate if rate else None,
            )
        )

    def report(self, *, remaining: int, ended: Ended, detail: str) -> RedriveReport:
        names = set(RedriveReport.__dataclass_fields__) - {"remaining", "ended", "detail"}
        return RedriveReport(
            **{name: self._counts[name] for name in names},
            remaining=remaining,
            ended=ended,
            detail=detail,
        )
