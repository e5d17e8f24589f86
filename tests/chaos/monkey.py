"""Kill pool processes and workers, stop workers, and cut them off from SQS, at random moments."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.support.fault_proxy import FaultProxy
from tests.support.processes import children

from .explain import Kill
from .fleet import Berth, Fleet

if TYPE_CHECKING:
    from typing_extensions import Self

#: The shortest and the longest outage of SQS.
OUTAGE_SECONDS = (0.3, 1.5)


class Monkey:
    """Disturb the workers of a fleet during the ``with`` block, and note each deed.

    Arguments:
        pause_seconds: the longest pause between two deeds. Each pause is random.
    """

    def __init__(self, fleet: Fleet, proxy: FaultProxy, rng: Random, pause_seconds: float) -> None:
        self.kills: list[Kill] = []
        self.outages: list[tuple[float, float]] = []
        self.deeds: Counter[str] = Counter()
        self._fleet = fleet
        self._proxy = proxy
        self._rng = rng
        self._pause_seconds = pause_seconds
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monkey")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        deeds: dict[Callable[[], bool], int] = {
            self._kill_child: 10,
            self._kill_worker: 4,
            self._stop_worker: 3,
            self._pull_plug: 3,
        }
        while not self._enough.wait(self._rng.uniform(0, self._pause_seconds)):
            [deed] = self._rng.choices(list(deeds), list(deeds.values()))
            if deed():
                self.deeds[deed.__name__.strip("_")] += 1

    def _kill_child(self) -> bool:
        berths = [berth for berth in self._fleet.berths if berth.pool == "prefork"]
        worker = self._rng.choice(berths).worker
        pids = children(worker.pid) if worker else []
        return bool(pids) and self._signal(self._rng.choice(sorted(pids)), signal.SIGKILL)

    def _kill_worker(self) -> bool:
        """Kill a worker with all its processes."""
        berth = self._rng.choice(self._fleet.berths)
        if (worker := berth.worker) is None:
            return False
        berth.told_to_end.add(worker.pid)
        self._note(worker.pid, signal.SIGKILL)
        worker.kill()
        return True

    def _stop_worker(self) -> bool:
        """Stop a worker with SIGTERM, as a deploy does."""
        berth: Berth = self._rng.choice(self._fleet.berths)
        if (worker := berth.worker) is None or worker.pid in berth.told_to_end:
            return False
        berth.told_to_end.add(worker.pid)
        worker.send(signal.SIGTERM)
        return True

    def _pull_plug(self) -> bool:
        seconds = self._rng.uniform(*OUTAGE_SECONDS)
        begin = time.monotonic()
        self._proxy.unreachable(seconds)
        self.outages.append((begin, time.monotonic() + seconds))
        return not self._enough.wait(seconds)

    def _signal(self, pid: int, sig: signal.Signals) -> bool:
        self._note(pid, sig)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
        return True

    def _note(self, pid: int, sig: signal.Signals) -> None:
        self.kills.append(Kill(at=time.monotonic(), signal=sig.name, pid=pid))
