"""Whether the loops of a worker turn.

SQS that does not answer and a task that does not end are no faults here, because a restart of the
worker does not cure them. A restart cures a thread that died, a loop that hangs, and a process that
is stopped.
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

#: Age in seconds from which on a heartbeat file says that its worker is unhealthy.
MAX_AGE_SECONDS: Final = 20.0


@dataclass
class _Loop:
    limit_seconds: float
    is_alive: Callable[[], bool]
    last_turn: float


class Pulse:
    """Knows when each loop of a worker last turned. Safe in any thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: dict[str, _Loop] = {}
        self._checks: dict[str, Callable[[], str | None]] = {}

    def watch(
        self, name: str, *, limit_seconds: float, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Start to watch a loop.

        Args:
            name: of the loop, such as "poller of mails".
            limit_seconds: longest time of one turn, all timeouts of its calls included.
            is_alive: whether its thread is alive; a dead thread is a fault without a wait.
        """
        with self._lock:
            self._loops[name] = _Loop(limit_seconds, is_alive, self._clock())

    def check(self, name: str, fault: Callable[[], str | None]) -> None:
        """Add a check. At each look, ``fault`` returns a few words about a fault, or ``None``.

        Args:
            name: to forget it by.
            fault: must not block.
        """
        with self._lock:
            self._checks[name] = fault

    def note_turn(self, name: str) -> None:
        """Record that a loop has turned. Ignore a loop that is not watched."""
        loop = self._loops.get(name)
        if loop is not None:
            loop.last_turn = self._clock()

    def forget(self, name: str) -> None:
        """Stop watching a loop that was told to end."""
        with self._lock:
            self._loops.pop(name, None)
            self._checks.pop(name, None)

    def faults(self) -> list[str]:
        """Return a line for each loop that does not turn."""
        now = self._clock()
        with self._lock:
            loops, checks = list(self._loops.items()), list(self._checks.values())
        found = [fault for check in checks if (fault := check()) is not None]
        for name, loop in loops:
            silent = now - loop.last_turn
            if not loop.is_alive():
                found.append(f"{name} has died")
            elif silent > loop.limit_seconds:
                found.append(f"{name} has not turned for {silent:.0f} s")
        return found


class Heartbeat:
    """Touches a file every two seconds while all loops of a worker turn.

    The age of the file says whether the worker is alive; the worker's log names the faults.

    Args:
        path: of the file. Its directory must exist.
        pulse: of the worker.
    """

    def __init__(self, path: Path, pulse: Pulse) -> None:
        self._path = path
        self._pulse = pulse
        self._has_faults = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqs-heartbeat", daemon=True)

    def start(self) -> None:
        """Beat once, and go on in a thread."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and remove the file."""
        self._stopped.set()
        self._thread.join(INTERVAL_SECONDS)
        with suppress(OSError):
            self._path.unlink()

    def beat(self) -> None:
        """Touch the file if all loops turn. Log when faults begin and when they end."""
        if not (faults := self._pulse.faults()):
            try:
                self._path.touch()
            except OSError as exc:
                why = exc.strerror or type(exc).__name__
                faults = [f"the heartbeat {self._path} cannot be written: {why}"]
        if faults and not self._has_faults:
            logger.error("sqs_backoff.unhealthy: %s", "; ".join(faults))
        elif self._has_faults and not faults:
            logger.info("sqs_backoff.healthy: all loops of the worker turn again")
        self._has_faults = bool(faults)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self.beat()


def diagnosis(path: Path, *, now: float, max_age_seconds: float = MAX_AGE_SECONDS) -> str | None:
    """Return one line about why the worker of a heartbeat file is unhealthy, or ``None``.

    Args:
        path: of the file.
        now: seconds since the epoch.
        max_age_seconds: age from which on a worker counts as unhealthy.
    """
    try:
        age = now - path.stat().st_mtime
    except OSError as exc:
        return f"no heartbeat: {path} cannot be read ({type(exc).__name__})"
    if abs(age) <= max_age_seconds:
        return None
    return f"the last heartbeat is {age:.0f} s old; expected at most {max_age_seconds:g} s"
