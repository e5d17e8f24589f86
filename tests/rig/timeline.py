"""Virtual time: events in the order in which they are due, one after the other."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import time_machine

#: 15 January 2027, 08:00 UTC.
BEGIN = 1_800_000_000.0

#: More events than any test has. Without this limit, two events that cause each other never end.
_MOST_EVENTS = 1_000_000


class Timeline:
    """The clock of SQS and of all workers, and what is about to happen.

    While it runs (``with timeline:``) ``time.time()`` and ``datetime.now()`` are virtual too.
    Seconds since the epoch, everywhere.
    """

    def __init__(self) -> None:
        self.now = BEGIN
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._travel = time_machine.travel(BEGIN, tick=False)
        self._coordinates: time_machine.Coordinates | None = None

    def __call__(self) -> float:
        return self.now

    def __enter__(self) -> Timeline:
        self._coordinates = self._travel.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._travel.stop()

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Do something at a time, or now if that is past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._number), do))

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, with all that happens meanwhile; stop early when ``until()`` is true."""
        end = self.now + seconds
        for _ in range(_MOST_EVENTS):
            if until():
                return
            if not self._events or self._events[0][0] > end:
                self._move_to(end)
                return
            at, _, do = heapq.heappop(self._events)
            self._move_to(at)
            do()
        raise AssertionError("the events of this test never end")

    def _move_to(self, at: float) -> None:
        if at > self.now:
            self.now = at
            if self._coordinates is not None:
                self._coordinates.move_to(at)
