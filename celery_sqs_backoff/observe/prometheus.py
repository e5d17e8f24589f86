"""Keeps a worker's numbers for Prometheus. Needs the extra ``prometheus``.

The numbers are kept here and handed over at each scrape. ``prometheus_client``'s own counters
would write to files wherever ``PROMETHEUS_MULTIPROC_DIR`` is set, for example for the web
processes of the same image, and fail if that directory is not there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from .instruments import INSTRUMENTS, Instrument, Kind
from .metrics import Readings
from .totals import Totals

__all__ = ["PrometheusRecorder"]

_Labels = tuple[str, ...]


class _Distribution:
    """The values of a histogram that had the same labels."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)  # the last: above all bounds
        self.total = 0.0


class PrometheusRecorder:
    """A :class:`.metrics.Recorder` that a registry collects. Safe in any thread.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._histograms: dict[str, dict[_Labels, _Distribution]] = defaultdict(dict)
        self._reads: list[tuple[Instrument, Callable[[], Readings]]] = []
        registry.register(self)

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """Add to a counter, or enter a value of a histogram."""
        if instrument.kind is Kind.COUNTER:
            self._totals.add(instrument, amount, labels)
            return
        with self._lock:
            found = self._histograms[instrument.name].get(labels)
            if found is None:
                found = _Distribution(len(instrument.buckets))
                self._histograms[instrument.name][labels] = found
            found.counts[bisect_left(instrument.buckets, amount)] += 1
            found.total += amount

    def read_by(self, instrument: Instrument, read: Callable[[], Readings]) -> None:
        """Ask ``read`` for a gauge at each scrape."""
        self._reads.append((instrument, read))

    def collect(self) -> Iterator[Metric]:
        """The metrics, as ``prometheus_client`` asks for them."""
        for one in INSTRUMENTS:
            if one.kind is Kind.COUNTER:
                yield self._counter(one)
            elif one.kind is Kind.HISTOGRAM:
                yield self._histogram(one)
        for one, read in self._reads:
            gauge = GaugeMetricFamily(one.prometheus_name, one.text, labels=one.labels)
            for labels, value in read():
                gauge.add_metric(labels, value)
            yield gauge

    def _counter(self, one: Instrument) -> Metric:
        family = CounterMetricFamily(one.prometheus_name, one.text, labels=one.labels)
        for labels, value in self._totals.read(one):
            family.add_metric(labels, value)
        return family

    def _histogram(self, one: Instrument) -> Metric:
        family = HistogramMetricFamily(one.prometheus_name, one.text, labels=one.labels)
        bounds = [*map(floatToGoString, one.buckets), "+Inf"]
        with self._lock:
            found = [
                (labels, list(accumulate(values.counts)), values.total)
                for labels, values in self._histograms[one.name].items()
            ]
        for labels, counts, total in found:
            buckets = list(zip(bounds, map(float, counts), strict=True))
            family.add_metric(labels, buckets, total)
        return family
