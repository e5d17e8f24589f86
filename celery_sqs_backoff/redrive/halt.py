"""Why and when a run is to end: the first reason counts. Safe for threads."""

from __future__ import annotations

import threading

from .errors import RedriveError, RedriveUnreachable
from .report import Ended

__all__ = ["Halt"]


class Halt:
    """Set once; threads look at it between any two steps.

    Arguments:
        stop: set from outside, ends the run.
    """

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._has_reason = False
        self.ended, self.detail = Ended.DONE, ""
        self.error: BaseException | None = None

    def __call__(self, ended: Ended, detail: str = "") -> None:
        with self._lock:
            if not self._has_reason:
                self._has_reason, self.ended, self.detail = True, ended, detail
            self._event.set()

    def fail(self, exc: BaseException) -> None:
        """End the run because of an exception, which is raised in the end."""
        with self._lock:
            self.error = self.error or exc
        ended = Ended.UNREACHABLE if isinstance(exc, RedriveUnreachable) else Ended.ERROR
        self(ended, str(exc) if isinstance(exc, RedriveError) else type(exc).__name__)

    def finish(self) -> None:
        """All is done: whoever waits may go."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        if self._stop.is_set() and not self._event.is_set():
            self(Ended.INTERRUPTED, "stopped from outside")
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long."""
        return self._event.wait(seconds) or self.is_set
