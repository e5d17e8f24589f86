"""The numbers of one worker for Prometheus, counted from its events in its main process.

The numbers are kept here. ``prometheus_client``'s own counters would write to files wherever
``PROMETHEUS_MULTIPROC_DIR`` is set, for example for the web processes of the same image. Labels are
task, queue, outcome, reason, error code and SQS's action, never a text of an exception.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from . import instruments as of
from .board import ProviderNow
from .events import Event, Polled
from .instruments import INSTRUMENTS, Instrument
from .waiting import Waiting

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_Labels: TypeAlias = tuple[str, ...]

#: Label values, and the number.
Readings: TypeAlias = Iterable[tuple[_Labels, float]]

#: Instruments by the event that they count.
_COUNTED_BY: Final[dict[type[Event], list[Instrument]]] = defaultdict(list)
for _one in INSTRUMENTS:
    if _one.event is not None:
        _COUNTED_BY[_one.event].append(_one)


class Metrics:
    """A listener of :class:`.stream.Events`, and a collector of ``prometheus_client``.

    It is safe in any thread.

    Args:
        waiting: the same worker's fold of the messages that wait.
        running: how many tasks of a queue the pool is running.
        providers: the state of each provider and tenant in the worker.
        clock: seconds, monotonic.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        waiting: Waiting,
        *,
        running: Callable[[str], int] = lambda queue: 0,
        providers: Callable[[], Iterable[ProviderNow]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._providers = providers
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._sums: dict[str, dict[_Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._buckets: dict[str, dict[_Labels, list[int]]] = defaultdict(dict)
        self._last_receive: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if (queue := event.queue) and (
            isinstance(event, Polled) or queue not in self._last_receive
        ):
            self._last_receive[queue] = self._clock()
        for one in _COUNTED_BY.get(type(event), ()):
            if (amount := one.amount(event)) is not None:
                labels = tuple(getattr(event, label) or "unknown" for label in one.labels)
                with self._lock:
                    self._add(one, amount, labels)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as ``prometheus_client`` asks for them."""
        from prometheus_client import core

        gauges = self._read_gauges()
        for one in INSTRUMENTS:
            name, text = one.prometheus_name, one.text
            if one.buckets:
                yield self._histogram(one)
                continue
            is_gauge = one.event is None
            make: Any = core.GaugeMetricFamily if is_gauge else core.CounterMetricFamily
            family: Any = make(name, text, labels=one.labels)
            for labels, value in gauges[one] if is_gauge else self._read(one):
                family.add_metric(labels, value)
            yield family

    def _read_gauges(self) -> dict[Instrument, Readings]:
        at, clock = self._now(), self._clock()
        received = dict(self._last_receive)
        known = [((queue,), self._waiting.now(queue, at=at)) for queue in received]
        of_providers: dict[Instrument, Counter[_Labels]] = defaultdict(Counter)
        for one in self._providers():
            name = one.provider
            for state in ("paused", "recovering"):
                of_providers[of.PROVIDER_STATE][name, state] += one.state == state
            of_providers[of.PROVIDER_RATE][name,] += one.rate  # type: ignore[assignment]
            of_providers[of.PROVIDER_WAITING][name, "hidden"] += one.hidden
            of_providers[of.PROVIDER_WAITING][name, "in line"] += one.in_line
        return {
            of.RUNNING: [((queue,), self._running(queue)) for queue in received],
            of.WAITING: [(labels, now.waiting) for labels, now in known],
            of.OLDEST: [
                (labels, max(0.0, at - (now.oldest_due_at or at))) for labels, now in known
            ],
            of.GIVING_UP: [(labels, now.giving_up) for labels, now in known],
            of.POLL_AGE: [((queue,), clock - last) for queue, last in received.items()],
            **{gauge: of_providers[gauge].items() for gauge in of.OF_PROVIDERS},
        }

    def _add(self, instrument: Instrument, amount: float, labels: _Labels) -> None:
        self._sums[instrument.name][labels] += amount
        if instrument.buckets:
            counts = self._buckets[instrument.name].get(labels)
            if counts is None:
                counts = [0] * (len(instrument.buckets) + 1)  # the last is above all bounds
                self._buckets[instrument.name][labels] = counts
            counts[bisect_left(instrument.buckets, amount)] += 1

    def _read(self, instrument: Instrument) -> Readings:
        with self._lock:
            return list(self._sums[instrument.name].items())

    def _histogram(self, one: Instrument) -> Metric:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        family = HistogramMetricFamily(one.prometheus_name, one.text, labels=one.labels)
        bounds = [*map(floatToGoString, one.buckets), "+Inf"]
        with self._lock:
            sums = self._sums[one.name]
            found = [
                (labels, list(accumulate(counts)), sums[labels])
                for labels, counts in self._buckets[one.name].items()
            ]
        for labels, counts, total in found:
            family.add_metric(labels, list(zip(bounds, map(float, counts), strict=True)), total)
        return family
