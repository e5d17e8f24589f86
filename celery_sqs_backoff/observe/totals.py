"""Counters that are kept here and read when somebody looks."""

from __future__ import annotations

import threading
from collections import defaultdict

from .instruments import Instrument
from .metrics import Readings

__all__ = ["Totals"]


class Totals:
    """Sums by instrument and label values. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def add(self, instrument: Instrument, amount: float, labels: tuple[str, ...]) -> None:
        with self._lock:
            sums = self._sums[instrument.name]
            sums[labels] = sums.get(labels, 0.0) + amount

    def read(self, instrument: Instrument) -> Readings:
        """Return a copy of an instrument's sums."""
        with self._lock:
            return list(self._sums[instrument.name].items())
