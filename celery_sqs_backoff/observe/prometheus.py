"""Keeps a worker's numbers for Prometheus. Needs the extra ``prometheus``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from .instruments import INSTRUMENTS, Instrument, Kind
from .metrics import Readings

__all__ = ["PrometheusRecorder"]


class PrometheusRecorder:
    """A :class:`.metrics.Recorder` with a registry of its own.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Callable[[float], None]] = {}
        self._reads: list[tuple[Instrument, Callable[[], Readings]]] = []
        for one in INSTRUMENTS:
            name = f"sqs_backoff_{one.name}"
            if one.kind is Kind.COUNTER:
                self._metrics[one.name] = Counter(name, one.text, one.labels, registry=registry)
            elif one.kind is Kind.HISTOGRAM:
                self._metrics[one.name] = Histogram(
                    name, one.text, one.labels, buckets=one.buckets, registry=registry
                )
        registry.register(self)

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """Add to a counter, or enter a value of a histogram."""
        key = (instrument.name, *labels)
        child = self._children.get(key)
        if child is None:
            metric = self._metrics[instrument.name].labels(*labels)
            child = metric.inc if instrument.kind is Kind.COUNTER else metric.observe
            self._children[key] = child
        child(amount)

    def read_by(self, instrument: Instrument, read: Callable[[], Readings]) -> None:
        """Ask ``read`` for a gauge at each scrape."""
        self._reads.append((instrument, read))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges, as ``prometheus_client`` asks for them."""
        for instrument, read in self._reads:
            family = GaugeMetricFamily(
                instrument.prometheus_name, instrument.text, labels=instrument.labels
            )
            for labels, value in read():
                family.add_metric(labels, value)
            yield family
