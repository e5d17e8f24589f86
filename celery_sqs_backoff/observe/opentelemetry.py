"""Keeps a worker's numbers by OpenTelemetry's API. Needs the extra ``opentelemetry``.

The API alone: which SDK and which exporter, and how often it exports, is for the app to set up in
the worker's main process, or for ``opentelemetry-instrument``.

The SDK goes on to export in a pool process that is forked, with whatever was counted until then.
So counters are kept here and read at each export, as gauges are, and a fork reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from ..version import __version__
from .instruments import INSTRUMENTS, Instrument, Kind
from .metrics import Readings
from .totals import Totals

__all__ = ["OpenTelemetryRecorder"]


class OpenTelemetryRecorder:
    """A :class:`.metrics.Recorder` over a meter.

    Args:
        provider: of meters; ``None`` = the global one.
    """

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        found = metrics.get_meter_provider() if provider is None else provider
        self._meter = found.get_meter("celery_sqs_backoff", __version__)
        self._process = os.getpid()
        self._totals = Totals()
        self._recorders: dict[str, Callable[..., None]] = {}
        for one in INSTRUMENTS:
            name, unit = one.opentelemetry_name, one.unit or "1"
            if one.kind is Kind.COUNTER:
                observe = self._observer(one, partial(self._totals.read, one))
                self._meter.create_observable_counter(name, [observe], unit, one.text)
            elif one.kind is Kind.HISTOGRAM:
                buckets: Any = list(one.buckets)
                histogram = self._meter.create_histogram(
                    name, unit, one.text, explicit_bucket_boundaries_advisory=buckets
                )
                self._recorders[one.name] = histogram.record

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """Add to a counter, or record a value of a histogram."""
        if instrument.kind is Kind.COUNTER:
            self._totals.add(instrument, amount, labels)
            return
        attributes = dict(zip(instrument.labels, labels, strict=True))
        self._recorders[instrument.name](amount, attributes)

    def read_by(self, instrument: Instrument, read: Callable[[], Readings]) -> None:
        """Ask ``read`` for a gauge at each export."""
        self._meter.create_observable_gauge(
            instrument.opentelemetry_name,
            [self._observer(instrument, read)],
            instrument.unit or "1",
            instrument.text,
        )

    def _observer(
        self, instrument: Instrument, read: Callable[[], Readings]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            if os.getpid() != self._process:
                return []
            return [
                Observation(value, dict(zip(instrument.labels, labels, strict=True)))
                for labels, value in read()
            ]

        return observe
