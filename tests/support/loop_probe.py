"""How long was a worker's event loop blocked? Included in a worker, writes its worst delays.

Start the worker with ``**loop_probe.options(path)`` and read ``loop_probe.blockages(path)``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TypedDict

from celery.signals import worker_ready

_FILE_VARIABLE = "TEST_LOOP_PROBE_FILE"

#: The loop is asked to run the probe this often; all beyond it is delay.
INTERVAL_SECONDS = 0.01

#: Shorter delays are the scheduler's and the pool's.
THRESHOLD_SECONDS = 0.02


class Options(TypedDict):
    """Of :func:`tests.support.workers.worker`."""

    env: dict[str, str]
    include: tuple[str, ...]


def options(path: Path) -> Options:
    """Return the environment of a worker that is probed."""
    return {"env": {_FILE_VARIABLE: str(path)}, "include": (__name__,)}


def blockages(path: Path) -> list[float]:
    """Seconds of each time that the loop stood still, in order."""
    assert path.exists(), "the probe has not started: is it a pool with an event loop?"
    return [float(line) for line in path.read_text().split()]


class _Probe:
    """Makes its file when the loop runs it for the first time: no file, no measurement."""

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
