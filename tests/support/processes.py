"""Start, watch and end child processes of tests, and wait for them with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    *,
    timeout: float = 10.0,
    interval: float = 0.05,
    message: str | Callable[[], str] = "",
) -> T:
    """Return the first true value of ``condition()``, or fail after ``timeout`` seconds.

    ``message`` may be a callable, so that it can show the state at the deadline.
    """
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline:
            said = message() if callable(message) else message
            raise AssertionError(f"not within {timeout:g} s: {said or condition!r}")
        time.sleep(interval)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def stop(
    process: subprocess.Popen[bytes],
    *,
    sig: signal.Signals = signal.SIGTERM,
    timeout: float = 5.0,
) -> int:
    """End a child process and return its exit code. After ``timeout`` seconds, use SIGKILL."""
    if process.poll() is None:
        process.send_signal(sig)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def children(of: int | None = None) -> dict[int, str]:
    """Return the pids of the running children of a process, with their command lines.

    Without ``/proc`` the result is empty.

    Args:
        of: the pid of the parent. None means this process.
    """
    found = {}
    wanted = os.getpid() if of is None else of
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == wanted and state != "Z":
                command = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(status.parent.name)] = command.decode(errors="replace").strip()
    return found
