"""The thread through which workers tell each other, by the app's store, which providers are down.

It reads about one record a second per provider that is shared, and writes when something has
changed. Nothing else of the worker waits for the store: the gates know what the thread has read
last. While the store is away each worker finds out, and probes, by itself.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from celery.utils.log import get_logger

from ..provider.shared import PERMIT_SECONDS, RECORD_SECONDS, SharedHealth, Word
from ..store.protocol import Store, key_of
from ..threads import start_daemon
from .gate import Gate

__all__ = ["Sharing"]

logger = get_logger(__name__)

#: Between two looks, drawn each time. Else a worker whose looks keep step with its receives would
#: bring messages forward just when another worker's receive is next, and never probe.
_PAUSES_SECONDS: Final = (0.5, 1.5)

#: A store that hangs for longer is away: its call may never end.
_PATIENCE_SECONDS: Final = 30.0

#: Until a store that is away is asked again.
_AWAY_SECONDS: Final = 5.0


class Lock(Protocol):
    """Whatever guards the gates."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exc_info: object) -> object: ...


class Sharing:
    """Shares the health of gates.

    Arguments:
        store: the app's records.
        lock: guards the gates.
        clock: of the gates.
        worker: this worker's name.
        wake: called with a gate that may have opened or closed.
        rng: for the jitter of pauses.
    """

    def __init__(
        self,
        store: Store,
        *,
        lock: Lock,
        clock: Callable[[], float],
        worker: str,
        wake: Callable[[Gate], object],
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._lock = lock
        self._clock = clock
        self._worker = worker
        self._wake = wake
        self._rng = rng or random.Random()
        self._shared: dict[Gate, tuple[SharedHealth, str, str]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._is_away = False

    def add(self, gate: Gate, name: tuple[str, ...]) -> None:
        """Share a gate from now on."""
        health, probe = key_of("health", *name), key_of("probe", *name)
        with self._lock:
            self._shared[gate] = SharedHealth(gate.control), health, probe
            self._wait_for_permits(gate, not self._is_away)
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is not None or self._stopped.is_set():
            return
        self._thread = start_daemon("sqs-shared", self._run)
        if self._thread is None:
            logger.warning("sqs_backoff.no_thread_left: no provider's health is shared yet")

    def _wait_for_permits(self, gate: Gate, is_needed: bool) -> None:
        health = gate.control.health
        health.needs_permit = is_needed
        health.permits_until = self._clock() + _PATIENCE_SECONDS

    def discard(self, gate: Gate) -> None:
        """Share a gate no more."""
        with self._lock:
            self._shared.pop(gate, None)

    def stop(self) -> None:
        """Tell nobody any more. A permit to probe ends by itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_seconds()):
            self.tick()

    def _pause_seconds(self) -> float:
        return _AWAY_SECONDS if self._is_away else self._rng.uniform(*_PAUSES_SECONDS)

    def tick(self) -> None:
        """Read and write once for each gate. Blocks; never raises."""
        with self._lock:
            shared = list(self._shared.items())
        gates = [gate for gate, _ in shared]
        try:
            for gate, known in shared:
                self._exchange(gate, *known)
        except Exception as exc:  # noqa: BLE001  # of any library: each worker goes on by itself
            self._note(gates, is_away=True, why=type(exc).__name__)
        else:
            self._note(gates, is_away=False)

    def _exchange(self, gate: Gate, shared: SharedHealth, health_key: str, probe_key: str) -> None:
        store = self._store
        text = store.get(health_key)
        with self._lock:
            word = shared.look(Word.of(text), self._clock(), time.time())
            self._wake(gate)
        if word is not None:
            is_written = (
                store.add(health_key, word.text(), RECORD_SECONDS) is None
                if text is None
                else store.replace(health_key, text, word.text(), RECORD_SECONDS)
            )
            if is_written:  # else somebody was faster: look again next time
                with self._lock:
                    shared.written(word)
        self._see_to_permit(gate, shared, probe_key)

    def _see_to_permit(self, gate: Gate, shared: SharedHealth, probe_key: str) -> None:
        store = self._store
        with self._lock:
            is_given_back = shared.gives_permit_back(self._clock())
        if is_given_back:
            store.delete(probe_key, self._worker)
        with self._lock:
            is_wanted = shared.wants_permit(self._clock())
        if not is_wanted:
            return
        asked_at = self._clock()
        holder = store.add(probe_key, self._worker, PERMIT_SECONDS)
        if holder is None or holder == self._worker:
            with self._lock:
                shared.permitted(asked_at)
                self._wake(gate)

    def _note(self, gates: list[Gate], *, is_away: bool, why: str = "") -> None:
        with self._lock:
            for gate in gates:
                self._wait_for_permits(gate, not is_away)
        if is_away and not self._is_away:
            logger.warning(
                "sqs_backoff.health_store_away: %s; this worker finds out by itself which"
                " providers are down until the store answers",
                why,
            )
        elif self._is_away and not is_away:
            logger.info("sqs_backoff.health_shared_again: the store answers")
        self._is_away = is_away
