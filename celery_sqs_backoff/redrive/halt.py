"""End a run, tell it the time, and pause it between two tries of a call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

from ..retry.policies import FullJitter
from .errors import RedriveError, RedriveUnreachable
from .events import Ended

TRIES = 6
_BETWEEN_TRIES = FullJitter(base=0.2, cap=5)
_RNG = random.Random()

#: Linux stops CLOCK_MONOTONIC during a suspend, but not CLOCK_BOOTTIME; macOS does it the other way
#: round for ``time.monotonic()``, whose CLOCK_MONOTONIC goes on.
#: https://docs.python.org/3/library/time.html#time.CLOCK_BOOTTIME
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_seconds() -> float:
    """Return seconds on a clock that never goes back and that counts a suspend."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def draw_pause(attempt: int) -> float:
    """Return how many seconds to wait after a failed try of a call."""
    return _BETWEEN_TRIES.delay(attempt, _RNG)


class Halt:
    """Ends a run, and tells it the time. The first reason counts. Safe for threads.

    Arguments:
        stop: set from outside, ends the run.
        clock: seconds. It counts a suspend of the machine.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.now = clock, now
        self._stop = stop or threading.Event()
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.ended, self.detail = Ended.DONE, ""
        self.error: BaseException | None = None

    def __call__(self, ended: Ended, detail: str = "") -> None:
        with self._lock:
            if self.ended is Ended.DONE:
                self.ended, self.detail = ended, detail
            self._event.set()

    def fail(self, exc: BaseException) -> None:
        """End the run because of an exception, which it raises in the end."""
        with self._lock:
            self.error = self.error or exc
        ended = Ended.UNREACHABLE if isinstance(exc, RedriveUnreachable) else Ended.ERROR
        self(ended, str(exc) if isinstance(exc, RedriveError) else type(exc).__name__)

    def finish(self) -> None:
        """End the waiting of all threads."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        if self._stop.is_set() and not self._event.is_set():
            self(Ended.INTERRUPTED, "stopped from outside")
        return self._event.is_set()

    def pause(self, attempt: int) -> None:
        """Wait between two tries of a call. A halt does not cut it short: tries are few."""
        time.sleep(draw_pause(attempt))

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most this many seconds."""
        return self._event.wait(seconds) or self.is_set
