"""Is this worker alive: do its loops turn? Not whether SQS answers, nor whether a task ends.

Restarting a worker does not cure an outage of SQS, and a long task is no fault. What a restart
cures is a thread that died, a loop that hangs, a process that is stopped.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

__all__ = ["MAX_AGE_SECONDS", "Heartbeat", "Pulse", "diagnosis", "seconds_up"]

logger = logging.getLogger(__name__)

#: Between two writes of the heartbeat file.
INTERVAL_SECONDS: Final = 5.0

#: A heartbeat file that is older than this was written by a worker that is stopped or gone. With
#: the interval it keeps the time until a stopped worker is noticed below 30 seconds.
MAX_AGE_SECONDS: Final = 20.0

#: A worker on another machine, or in another container, that has written the same file and has
#: been silent for so long is gone. Until then whoever looks has seen that something is wrong.
_FORGOTTEN_SECONDS: Final = 600.0

#: What it calls itself.
_NAME: Final = "the heartbeat"


@dataclass
class _Loop:
    limit_seconds: float
    is_alive: Callable[[], bool]
    last_turn: float


class Pulse:
    """When each loop of a worker last turned. Safe to use from any thread.

    Arguments:
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
        """Expect a loop to turn from now on.

        Arguments:
            name: what to call it when it does not, such as "poller of mails".
            limit_seconds: longest time of one turn, all timeouts of its calls included.
            is_alive: whether its thread is; a dead one need not be waited for.
        """
        with self._lock:
            self._loops[name] = _Loop(limit_seconds, is_alive, self._clock())

    def check(self, name: str, fault: Callable[[], str | None]) -> None:
        """Ask ``fault`` at each look: what is wrong, in a few words, or ``None``.

        Args:
            name: to forget it by.
            fault: must return at once.
        """
        with self._lock:
            self._checks[name] = fault

    def turned(self, name: str, *, limit_seconds: float | None = None) -> None:
        """Note that a loop has turned; one that is not watched is passed over.

        Args:
            name: of the loop.
            limit_seconds: of its next turn and those after it. Default: as before.
        """
        loop = self._loops.get(name)
        if loop is not None:
            if limit_seconds is not None:
                loop.limit_seconds = limit_seconds
            loop.last_turn = self._clock()

    def forget(self, name: str) -> None:
        """Expect nothing of a loop any more: it was told to end."""
        with self._lock:
            self._loops.pop(name, None)
            self._checks.pop(name, None)

    def faults(self) -> list[str]:
        """Say what does not turn; empty: all is well."""
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
    """Writes what :class:`Pulse` knows to a file, every five seconds, until it is stopped.

    The file is replaced, never rewritten, so a reader sees a whole one. A disk that is full or
    read-only leaves an old file behind: the worker is then taken for dead.

    Arguments:
        path: of the file. Its directory must exist.
        pulse: of the worker.
        now: seconds since the epoch, because another process reads it.
    """

    def __init__(self, path: Path, pulse: Pulse, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._pulse = pulse
        self._now = now
        self._written_at: float | None = None
        self._has_failed = False
        self._id = uuid4().hex  # in containers, each worker may be process 1
        self._others: dict[str, _Writer] = {}  # as each has last written
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write now, and go on in a thread."""
        self.write()
        self._thread = threading.Thread(target=self._run, name="sqs-heartbeat", daemon=True)
        self._thread.start()
        self._pulse.check(_NAME, self._fault)

    def stop(self) -> None:
        """Write no more, and remove the file, unless another worker writes it too."""
        self._stopped.set()
        self._pulse.forget(_NAME)
        if self._thread is not None:
            self._thread.join(INTERVAL_SECONDS)
        if (writer := _writer(self._path)) is not None and writer.id == self._id:
            with suppress(OSError):
                self._path.unlink()

    def write(self) -> None:
        """Write the file once. Does not raise."""
        self._note_other_writer()
        faults = [
            f"process {pid} writes this file too: each worker needs a file of its own"
            for pid in sorted({other.pid for other in self._others.values()})
        ]
        now = self._now()
        faults += self._pulse.faults()
        mine = {"id": self._id, "pid": os.getpid(), "where": _where(), "at": now, "faults": faults}
        temporary = self._path.with_name(f".{self._path.name}.{self._id[:8]}")
        try:
            temporary.write_text(json.dumps(mine))
            temporary.replace(self._path)
        except OSError as exc:
            with suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                logger.error(
                    "sqs_backoff.heartbeat_not_written: %s: %s; trying again every %g s",
                    *(self._path, exc.strerror or type(exc).__name__, INTERVAL_SECONDS),
                )
            self._has_failed = True
        else:
            self._has_failed = False
            self._written_at = now

    def _note_other_writer(self) -> None:
        """Two workers with one file hide each other's faults, and one that is stopped.

        What is there from before this worker's first write is nobody's any more.
        """
        now = self._now()
        self._others = {id_: one for id_, one in self._others.items() if not one.has_ended(now)}
        writer = _writer(self._path)
        if writer is None or writer.id == self._id:
            return
        if self._written_at is not None and writer.at >= self._written_at:
            if writer.id not in self._others:
                logger.error(
                    "sqs_backoff.shared_heartbeat: process %d writes %s too: each worker needs a"
                    " file of its own",
                    *(writer.pid, self._path),
                )
            self._others[writer.id] = writer

    def _fault(self) -> str | None:
        """For ``/healthz``; whoever reads the file sees that it is old."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return None if is_alive or self._stopped.is_set() else f"{_NAME} has died"

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self.write()


@dataclass(frozen=True)
class _Writer:
    """Who has last written a heartbeat file.

    Attributes:
        id: of its own.
        pid: its process.
        where: on which machine, or in which container, that number counts.
        at: when, in seconds since the epoch.
    """

    id: str
    pid: int
    where: str
    at: float

    def has_ended(self, now: float) -> bool:
        """Whether it is gone, and not just stopped: elsewhere nobody can tell for a while."""
        if self.where == _where():
            return not _runs(self.pid)
        return now - self.at > _FORGOTTEN_SECONDS


def _writer(path: Path) -> _Writer | None:
    """Who has written a heartbeat file; ``None``: nobody knows."""
    try:
        found = json.loads(path.read_text())
        return _Writer(str(found["id"]), int(found["pid"]), str(found["where"]), float(found["at"]))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _where() -> str:
    """Containers have process numbers of their own, and mostly a host name."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, ValueError):
        return False
    return True


def seconds_up() -> float | None:
    """How long this container, or this machine, has been up; ``None``: not known (no Linux)."""
    try:
        began = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def diagnosis(
    path: Path,
    *,
    now: float,
    max_age_seconds: float = MAX_AGE_SECONDS,
    up_seconds: float | None = None,
) -> str | None:
    """Say in one line why the writer of a heartbeat file is unhealthy; ``None``: it is not.

    Arguments:
        path: the file.
        now: seconds since the epoch.
        max_age_seconds: age from which on the file says that nobody writes it.
        up_seconds: how long the reader's container has been up. A volume keeps the file of a
            container that has crashed, and a startup probe would take it for the new one's, which
            has the same host name. (Another that looks at this one's file has its own.)
    """
    try:
        found = json.loads(path.read_text())
        at, faults = float(found["at"]), [str(fault) for fault in found["faults"]]
        is_of_this_host = str(found.get("where")).partition(" ")[0] == socket.gethostname()
        if not math.isfinite(at):
            raise ValueError("not a time")
    except OSError as exc:
        return f"no heartbeat: {path} cannot be read ({type(exc).__name__})"
    except (KeyError, TypeError, ValueError):
        return f"no heartbeat: {path} holds something else"
    age = now - at
    if age < -max_age_seconds:
        return f"the last heartbeat is {-age:.0f} s in the future: the clock was set back"
    if age > max_age_seconds:
        return f"the last heartbeat is {age:.0f} s old; expected at most {max_age_seconds:g} s"
    if is_of_this_host and up_seconds is not None and age > up_seconds:
        return "the last heartbeat is from before this container started"
    return "; ".join(faults) or None
