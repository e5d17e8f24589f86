"""Keep records in the memory of one process, for tests and for pools in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: After every 1,000 added records, the store deletes the expired records.
_SWEEP_EVERY = 1000


class MemoryStore:
    """A dict with a lock. Its records end with the process, and no other process sees them.

    Arguments:
        clock: returns seconds. Default: the machine's monotonic clock.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, tuple[str, float]] = {}
        self._added = 0

    def add(self, key: str, value: str, ttl: float) -> str | None:
        with self._lock:
            if (there := self._get(key)) is None:
                self._records[key] = (value, self._clock() + ttl)
                self._sweep()
            return there

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._get(key)

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        with self._lock:
            if is_there := self._get(key) == old:
                end = self._records[key][1] if ttl is None else self._clock() + ttl
                self._records[key] = (new, end)
            return is_there

    def delete(self, key: str, old: str) -> bool:
        with self._lock:
            if is_there := self._get(key) == old:
                del self._records[key]
            return is_there

    def _get(self, key: str) -> str | None:
        value, expires_at = self._records.get(key, (None, 0.0))
        return value if self._clock() < expires_at else None

    def _sweep(self) -> None:
        self._added += 1
        if self._added >= _SWEEP_EVERY:
            self._added, now = 0, self._clock()
            self._records = {k: r for k, r in self._records.items() if now < r[1]}
