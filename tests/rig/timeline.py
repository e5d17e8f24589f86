"""Virtual time: a clock, and events that happen one after the other when they are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import time_machine

#: 15 January 2027, 08:00 UTC.
BEGIN = 1_800_000_000.0

#: No test has so many events. The limit ends a test in which two events cause each other for ever.
_MOST_EVENTS = 1_000_000


class Timeline:
    """The clock of SQS and of all workers, and the events to come.

    In the block ``with timeline:``, ``time.time()`` and ``datetime.now()`` also show this clock.
    All times are seconds since the epoch.
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
        """Do something at a time, or now if the time is past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._number), do))

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, with all events that are due. Stop early if ``until()`` is true."""
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
