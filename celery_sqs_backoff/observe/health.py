"""Check whether the loops of a worker are running, and touch a heartbeat file while they are.

A turn is one pass through a loop. Only faults that a restart of the worker cures count: a dead
thread, a loop that hangs, and a stopped process. An outage of SQS and a task that does not end are
not faults.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

#: Seconds between two touches of the heartbeat file.
INTERVAL_SECONDS: Final = 2.0

#: A worker counts as unhealthy if its heartbeat file is older than this number of seconds.
MAX_AGE_SECONDS: Final = 20.0


@dataclass
class _Loop:
    limit_seconds: float
    is_alive: Callable[[], bool]
    last_turn: float


class Pulse:
    """Records when each loop of a worker last completed a turn. Thread-safe.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: dict[str, _Loop] = {}
        self._checks: list[Callable[[], str | None]] = []

    def watch(
        self, name: str, *, limit_seconds: float, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Start to watch a loop.

        Args:
            name: name of the loop, such as "poller of mails".
            limit_seconds: longest time of one turn, including all timeouts of its calls.
            is_alive: returns whether the loop's thread is alive. A dead thread is a fault
                immediately.
        """
        with self._lock:
            self._loops[name] = _Loop(limit_seconds, is_alive, self._clock())

    def check(self, fault: Callable[[], str | None]) -> None:
        """Add a check that ``faults()`` calls.

        Args:
            fault: returns a short text about a fault, or ``None``. It must not block.
        """
        self._checks.append(fault)

    def note_turn(self, name: str) -> None:
        """Record that a loop has completed a turn. Ignore a loop that is not watched."""
        loop = self._loops.get(name)
        if loop is not None:
            loop.last_turn = self._clock()

    def forget(self, name: str) -> None:
        """Stop watching a loop."""
        with self._lock:
            self._loops.pop(name, None)

    def faults(self) -> list[str]:
        """Return a text for each loop that hangs or has died, and for each check with a fault."""
        now = self._clock()
        with self._lock:
            loops = list(self._loops.items())
        found = [fault for check in self._checks if (fault := check()) is not None]
        for name, loop in loops:
            silent = now - loop.last_turn
            if not loop.is_alive():
                found.append(f"{name} has died")
            elif silent > loop.limit_seconds:
                found.append(f"{name} has completed no turn for {silent:.0f} s")
        return found


class Heartbeat:
    """Touches a file every two seconds while all loops of a worker are running.

    An old file means that the worker is unhealthy. The worker's log names the faults.

    Args:
        path: path of the file. Its directory must exist.
        pulse: the worker's record of its loops.
    """

    def __init__(self, path: Path, pulse: Pulse) -> None:
        self._path = path
        self._pulse = pulse
        self._has_faults = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqs-heartbeat", daemon=True)

    def start(self) -> None:
        """Touch the file, and start the thread that touches it every two seconds."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and remove the file."""
        self._stopped.set()
        self._thread.join(INTERVAL_SECONDS)
        with suppress(OSError):
            self._path.unlink()

    def beat(self) -> None:
        """Touch the file if all loops are running. Log when faults begin and when they end."""
        if not (faults := self._pulse.faults()):
            try:
                self._path.touch()
            except OSError as exc:
                why = exc.strerror or type(exc).__name__
                faults = [f"the heartbeat {self._path} cannot be written: {why}"]
        if faults and not self._has_faults:
            logger.error("sqs_backoff.unhealthy: %s", "; ".join(faults))
        elif self._has_faults and not faults:
            logger.info("sqs_backoff.healthy: all loops of the worker are running again")
        self._has_faults = bool(faults)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self.beat()


def diagnosis(path: Path, *, now: float, max_age_seconds: float = MAX_AGE_SECONDS) -> str | None:
    """Return one line that says why a worker is unhealthy, or ``None`` if it is healthy.

    Args:
        path: path of the worker's heartbeat file.
        now: seconds since the epoch.
        max_age_seconds: a worker with an older heartbeat is unhealthy. Default 20. A worker whose
            heartbeat is more than this number of seconds in the future is unhealthy, too.
    """
    try:
        age = now - path.stat().st_mtime
    except OSError as exc:
        return f"no heartbeat: {path} cannot be read ({type(exc).__name__})"
    if abs(age) <= max_age_seconds:
        return None
    if age < 0:
        return f"the last heartbeat is {-age:.0f} s in the future: check the clocks"
    return f"the last heartbeat is {age:.0f} s old; expected at most {max_age_seconds:g} s"
