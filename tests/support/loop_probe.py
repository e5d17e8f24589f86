"""Measure how long a worker's event loop is blocked.

Start the worker with ``**loop_probe.options(path)``. It then imports this module and writes each
long delay of its loop to the file. ``loop_probe.blockages(path)`` reads the file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TypedDict

from celery.signals import worker_ready

_FILE_VARIABLE = "TEST_LOOP_PROBE_FILE"

#: The loop should call the probe at this interval. If a call comes later, the loop was blocked.
INTERVAL_SECONDS = 0.01

#: Shorter delays do not count. The system's scheduler and the pool cause them.
THRESHOLD_SECONDS = 0.02


class Options(TypedDict):
    """Some options of :func:`tests.support.workers.worker`."""

    env: dict[str, str]
    include: tuple[str, ...]


def options(path: Path) -> Options:
    """Return the options of a worker whose loop the probe measures."""
    return {"env": {_FILE_VARIABLE: str(path)}, "include": (__name__,)}


def blockages(path: Path) -> list[float]:
    """Return for how many seconds the loop was blocked each time, in order."""
    assert path.exists(), "the probe has not started. Perhaps this pool has no event loop"
    return [float(line) for line in path.read_text().split()]


class _Probe:
    """The loop calls a probe regularly. The first call makes the file, to prove that it runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = time.monotonic()
        self._started = False

    def __call__(self) -> None:
        now = time.monotonic()
        delay = now - self._last - INTERVAL_SECONDS
        self._last = now
        if delay >= THRESHOLD_SECONDS:
            with self._path.open("a") as file:
                file.write(f"{delay:.4f}\n")
        elif not self._started:
            self._path.touch()
            self._started = True


@worker_ready.connect(weak=False)
def _start(sender: Any, **_: object) -> None:
    path = os.environ.get(_FILE_VARIABLE)
    if path and sender.hub is not None:
        sender.hub.call_repeatedly(INTERVAL_SECONDS, _Probe(Path(path)))
