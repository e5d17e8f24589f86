"""Count the events of a worker for Prometheus, in the worker's main process.

This module keeps the numbers itself. The counters of ``prometheus_client`` would write to files if
``PROMETHEUS_MULTIPROC_DIR`` is set. A container image may set this variable for its web processes,
but the worker must not add files to theirs. The values of labels are names, states, reasons or
error codes, never texts of exceptions.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from . import events as of
from .board import WorkerNow

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

#: Readings of one metric. Each is a pair: the values of the labels, and the metric's value.
_Readings: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Instrument:
    """One metric.

    Attributes:
        name: name of the metric without the prefix ``sqs_backoff_``.
        labels: names of the labels, separated by spaces. Labels of a counter are fields of its
            event.
        text: description of the metric, a sentence.
        event: kind of event that the metric counts; ``None`` = a gauge, which is read at each
            scrape.
        amount: returns the number that an event adds.
    """

    name: str
    labels: str
    text: str
    event: type[of.WorkerEvent] | None = None
    amount: Callable[[Any], int] = lambda event: 1


#: All metrics. ``python -m tests.tables`` writes them into the docs.
INSTRUMENTS: Final = (
    Instrument(
        "runs_total",
        "task queue outcome",
        "Runs of tasks with the base class that ended. A run that a stopping worker interrupted"
        " does not count.",
        of.RunEnded,
    ),
    Instrument("retries_total", "task queue", "Runs that will be repeated.", of.Retried),
    Instrument(
        "dead_letters_total",
        "task queue reason",
        "Messages given up. Without a dead-letter queue, or with on_give_up='fail', they are"
        " deleted.",
        of.DeadLettered,
    ),
    Instrument(
        "discarded_total",
        "task queue",
        "Messages of tasks with the base class, deleted because they had expired or were revoked.",
        of.Discarded,
    ),
    Instrument("messages_running", "queue", "Running tasks, with the base class or without."),
    Instrument("messages_waiting", "queue", "Messages hidden by this worker and not due yet."),
    Instrument(
        "oldest_waiting_seconds",
        "queue",
        "Age of the oldest waiting message, since it was sent or since its ETA. 0 without one.",
    ),
    Instrument(
        "received_total", "queue", "Messages received.", of.Polled, lambda e: len(e.message_ids)
    ),
    Instrument("receives_total", "queue", "ReceiveMessage calls that SQS answered.", of.Polled),
    Instrument(
        "receive_failures_total", "queue code", "Failed ReceiveMessage calls.", of.ReceiveFailed
    ),
    Instrument("poll_age_seconds", "queue", "Time since the last answered ReceiveMessage."),
    Instrument(
        "calls_total", "queue action", "Batch calls to SQS, including failed ones.", of.Settled
    ),
    Instrument(
        "call_failures_total",
        "queue action code",
        "Entries of batch calls that SQS did not accept.",
        of.Settled,
        lambda call: call.failed,
    ),
    Instrument(
        "leases_lost_total",
        "task queue",
        "Running messages that another worker may be running, too.",
        of.LeaseLost,
    ),
    Instrument(
        "provider_state",
        "provider state",
        "1 if the provider is in this state (paused or recovering), otherwise 0. With a key it"
        " counts the tenants in this state.",
    ),
    Instrument(
        "provider_rate",
        "provider",
        "Calls a second that this worker may make to a recovering provider.",
    ),
    Instrument(
        "provider_waiting",
        "provider place",
        "Messages for the provider that this worker has hidden, or that wait in it for their turn.",
    ),
)

_COUNTED_BY: Final = {
    kind: [one for one in INSTRUMENTS if one.event is kind]
    for kind in {one.event for one in INSTRUMENTS}
}


class Metrics:
    """A listener of :class:`.events.Events`, and a collector of ``prometheus_client``.

    Thread-safe.

    Args:
        now: returns the present state of the worker's queues and providers.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, now: Callable[[], WorkerNow], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._sums: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._last_receive: dict[str, float] = {}

    def __call__(self, event: of.WorkerEvent) -> None:
        """Count an event."""
        # Until SQS has answered once, ``poll_age_seconds`` counts from the queue's first event.
        if (queue := event.queue) and (
            isinstance(event, of.Polled) or queue not in self._last_receive
        ):
            self._last_receive[queue] = self._clock()
        for one in _COUNTED_BY.get(type(event), ()):
            if amount := one.amount(event):
                labels = tuple(getattr(event, label) or "unknown" for label in one.labels.split())
                with self._lock:
                    self._sums[one.name][labels] += amount

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. ``prometheus_client`` calls this at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        readings = self._read_gauges()
        with self._lock:
            readings |= {name: list(sums.items()) for name, sums in self._sums.items()}
        for one in INSTRUMENTS:
            make: Any = CounterMetricFamily if one.event else GaugeMetricFamily
            family: Any = make(f"sqs_backoff_{one.name}", one.text, labels=one.labels.split())
            for labels, value in readings.get(one.name, ()):
                family.add_metric(labels, value)
            yield family

    def _read_gauges(self) -> dict[str, _Readings]:
        at, clock, now = time.time(), self._clock(), self._now()
        queues = [((name,), queue) for name, queue in now.queues.items()]
        last_receive = dict(self._last_receive)
        states: Counter[tuple[str, ...]] = Counter()
        rates: dict[tuple[str, ...], float] = defaultdict(float)
        places: Counter[tuple[str, ...]] = Counter()
        for one in now.providers:
            name = one.provider
            for state in ("paused", "recovering"):
                states[name, state] += one.state == state
            rates[name,] += one.rate
            places[name, "hidden"] += one.hidden
            places[name, "in line"] += one.in_line
        return {
            "messages_running": [(labels, queue.running) for labels, queue in queues],
            "messages_waiting": [(labels, queue.waiting) for labels, queue in queues],
            "oldest_waiting_seconds": [
                (labels, max(0.0, at - (queue.oldest_due_at or at))) for labels, queue in queues
            ],
            "poll_age_seconds": [((name,), clock - last) for name, last in last_receive.items()],
            "provider_state": states.items(),
            "provider_rate": rates.items(),
            "provider_waiting": places.items(),
        }
