"""Run several workers at a time, and replace each one that ends, until the chaos is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from tests.acceptance.stage import Stage
from tests.support.processes import eventually
from tests.support.workers import Worker

#: Pool and concurrency of each worker.
CREW = (("prefork", 2), ("prefork", 2), ("threads", 4))

_LOOK_SECONDS = 0.05
_STOP_TIMEOUT_SECONDS = 25.0


@dataclass(frozen=True, kw_only=True)
class Manned:
    """A worker that was started, with the access key that marks its calls to SQS."""

    pid: int
    access_key: str


class Berth:
    """A place for one worker at a time. When the worker ends, another one starts in its place."""

    def __init__(self, stage: Stage, pool: str, concurrency: int, stopping: threading.Event):
        self.pool = pool
        self.worker: Worker | None = None
        self.manned: list[Manned] = []
        #: The output of each worker that did not start, or that ended by itself.
        self.deserted: list[str] = []
        self.told_to_end: set[int] = set()
        self._stage = stage
        self._concurrency = concurrency
        self._stopping = stopping
        self._thread = threading.Thread(target=self._run, name=f"berth-{pool}")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            key = f"{self.pool}{id(self) % 1000}n{len(self.manned)}"
            try:
                with self._stage.worker(
                    pool=self.pool,
                    concurrency=self._concurrency,
                    conf=_with_access_key(self._stage.worker_settings, key),
                    stop_timeout=_STOP_TIMEOUT_SECONDS,
                ) as worker:
                    self._watch(worker, key)
            except AssertionError as exc:  # the worker did not start
                self.deserted.append(str(exc))

    def _watch(self, worker: Worker, key: str) -> None:
        self.manned.append(Manned(pid=worker.pid, access_key=key))
        self.worker = worker
        while worker.is_running and not self._stopping.is_set():
            time.sleep(_LOOK_SECONDS)
        self.worker = None
        if not self._stopping.is_set() and worker.pid not in self.told_to_end:
            self.deserted.append(worker.log())


class Fleet:
    """All berths, and the workers that were started in them."""

    def __init__(self, berths: list[Berth]) -> None:
        self.berths = berths

    def pid_of(self, access_key: str) -> int | None:
        """Return the pid of the worker with this key, or None if that worker never became ready."""
        manned = (m for berth in self.berths for m in berth.manned)
        return next((m.pid for m in manned if m.access_key == access_key), None)

    @property
    def deserted(self) -> list[str]:
        return [log for berth in self.berths for log in berth.deserted]


@contextmanager
def fleet(stage: Stage) -> Iterator[Fleet]:
    """Keep the workers of ``CREW`` running during the block. All are ready when the block begins.

    At the end of the block, all workers get SIGTERM at the same time, and the block waits until
    they have stopped.
    """
    stopping = threading.Event()
    berths = [Berth(stage, pool, concurrency, stopping) for pool, concurrency in CREW]
    for berth in berths:
        berth.start()
    try:
        eventually(lambda: all(berth.worker or berth.deserted for berth in berths), timeout=60)
        yield Fleet(berths)
    finally:
        stopping.set()
        for berth in berths:
            berth.join()


def _with_access_key(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    options = deepcopy(settings["broker_transport_options"])
    for queue in options["predefined_queues"].values():
        queue["access_key_id"] = key
    return {"broker_transport_options": options}
