"""The numbers of one worker for Prometheus, counted from its events in its main process.

The numbers are kept here. ``prometheus_client``'s own counters would write to files wherever
``PROMETHEUS_MULTIPROC_DIR`` is set, for example for the web processes of the same image. Labels are
task, queue, outcome, reason, error code and SQS's action, never a text of an exception.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from . import instruments as of
from .events import (
    DeadLettered,
    Discarded,
    Event,
    GaveBack,
    LeaseLost,
    Parked,
    ProviderOpened,
    ProviderRecovered,
    Recalled,
    Received,
    ReceiveFailed,
    Retried,
    RunEnded,
    Settled,
)
from .instruments import INSTRUMENTS, Instrument, Kind
from .waiting import Waiting

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

#: How far ahead "gives up soon" looks.
GIVING_UP_SECONDS: Final = 2 * 3600.0

_Labels: TypeAlias = tuple[str, ...]

#: Label values, and the number.
Readings: TypeAlias = Iterable[tuple[_Labels, float]]

#: What an event adds: to which instrument, how much, and with which labels.
_Entries: TypeAlias = Iterable[tuple[Instrument, float, _Labels]]


def _run_ended(event: RunEnded) -> _Entries:
    yield of.RUNS, 1, (event.task, event.queue, event.outcome)
    if event.outcome == "succeeded":
        yield of.ATTEMPTS, event.attempt, (event.task, event.queue)


def _settled(event: Settled) -> _Entries:
    labels = (event.queue, event.operation)
    yield of.CALLS, 1, labels
    yield of.BATCH, event.entries, labels
    if event.renewals:
        yield of.RENEWALS, event.renewals, (event.queue,)
    if event.failed:
        yield of.CALL_FAILURES, event.failed, (*labels, event.code or "unknown")


_FOLDS: Final[dict[type[Event], Callable[[Any], _Entries]]] = {
    Received: lambda e: ((of.RECEIVES, 1, (e.queue,)), (of.RECEIVED, e.messages, (e.queue,))),
    ReceiveFailed: lambda e: ((of.RECEIVE_FAILURES, 1, (e.queue, e.code)),),
    RunEnded: _run_ended,
    Retried: lambda e: (
        (of.RETRIES, 1, (e.task, e.queue)),
        (of.DELAY, e.delay, (e.task, e.queue)),
    ),
    DeadLettered: lambda e: ((of.DEAD_LETTERS, 1, (e.task, e.queue, e.reason)),),
    Parked: lambda e: ((of.DEAD_LETTERS, 1, (e.task, e.queue, "parked")),),
    Discarded: lambda e: ((of.DISCARDED, 1, (e.task, e.queue)),),
    GaveBack: lambda e: ((of.GIVEN_BACK, 1, (e.queue,)),),
    LeaseLost: lambda e: ((of.LEASES_LOST, 1, (e.task, e.queue)),),
    Settled: _settled,
    ProviderOpened: lambda e: ((of.PROVIDER_OPENED, 1, (e.provider,)),),
    Recalled: lambda e: ((of.RECALLED, e.messages, (e.provider,)),),
}


class Metrics:
    """A listener of :class:`.stream.Events`, and a collector of ``prometheus_client``.

    It is safe in any thread.

    Args:
        waiting: the same worker's fold of the messages that wait.
        running: how many tasks of a queue the pool is running.
        waiting_for: messages that wait for providers, by provider and state.
        rates: calls a second to providers that recover.
        clock: seconds, monotonic.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        waiting: Waiting,
        *,
        running: Callable[[str], int] = lambda queue: 0,
        waiting_for: Callable[[], Readings] = tuple,
        rates: Callable[[], Readings] = tuple,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._waiting = waiting
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._sums: dict[str, dict[_Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._buckets: dict[str, dict[_Labels, list[int]]] = defaultdict(dict)
        self._last_receive: dict[str, float] = {}
        self._open: dict[str, set[str]] = defaultdict(set)  # tenants by provider
        self._gauges: dict[Instrument, Callable[[], Readings]] = {
            of.RUNNING: self._by_queue(running),
            of.WAITING: self._by_queue(waiting.count),
            of.OLDEST: self._by_queue(self._oldest),
            of.GIVING_UP: self._by_queue(self._giving_up),
            of.POLL_AGE: self._by_queue(lambda queue: clock() - self._last_receive[queue]),
            of.PROVIDER_OPEN: self._open_gates,
            of.PROVIDER_RATE: rates,
            of.PROVIDER_WAITING: waiting_for,
        }

    def __call__(self, event: Event) -> None:
        """Count an event."""
        kind, queue = type(event), event.queue
        if queue:
            if kind is Received or queue not in self._last_receive:
                self._last_receive[queue] = self._clock()
        elif isinstance(event, ProviderOpened):
            self._open[event.provider].add(event.tenant)
        elif isinstance(event, ProviderRecovered):
            self._open[event.provider].discard(event.tenant)
        if (fold := _FOLDS.get(kind)) is not None:
            with self._lock:
                for instrument, amount, labels in fold(event):
                    self._add(instrument, amount, labels)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as ``prometheus_client`` asks for them."""
        from prometheus_client import core

        for one in INSTRUMENTS:
            name, text = one.prometheus_name, one.text
            if one.kind is Kind.HISTOGRAM:
                yield self._histogram(one)
                continue
            is_gauge = one.kind is Kind.GAUGE
            make: Any = core.GaugeMetricFamily if is_gauge else core.CounterMetricFamily
            family: Any = make(name, text, labels=one.labels)
            for labels, value in self._gauges[one]() if is_gauge else self._read(one):
                family.add_metric(labels, value)
            yield family

    def _add(self, instrument: Instrument, amount: float, labels: _Labels) -> None:
        self._sums[instrument.name][labels] += amount
        if instrument.kind is Kind.HISTOGRAM:
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

    def _by_queue(self, read: Callable[[str], float]) -> Callable[[], Readings]:
        return lambda: [((queue,), float(read(queue))) for queue in list(self._last_receive)]

    def _open_gates(self) -> Readings:
        return [((provider,), float(len(open_))) for provider, open_ in list(self._open.items())]

    def _oldest(self, queue: str) -> float:
        due_at = self._waiting.now(queue, at=0, horizon=0).oldest_due_at
        return 0.0 if due_at is None else max(0.0, self._now() - due_at)

    def _giving_up(self, queue: str) -> float:
        waiting = self._waiting.now(queue, at=self._now(), horizon=GIVING_UP_SECONDS)
        return waiting.nearly_given_up
