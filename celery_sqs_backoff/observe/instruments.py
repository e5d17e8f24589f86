"""The metrics: names, labels and meanings. ``python -m tests.tables`` makes the docs of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """How values of an instrument add up."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True)
class Instrument:
    """One metric.

    Attributes:
        name: without the prefix ``sqs_backoff``, and without Prometheus' ``_total``.
        kind: how its values add up.
        text: what it counts, as a sentence.
        labels: their names.
        buckets: of a histogram.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Name on the page of metrics."""
        return f"sqs_backoff_{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


_TASK: Final = ("task", "queue")
_ATTEMPTS: Final = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
_DELAYS: Final = (1, 4, 16, 60, 300, 900, 3600, 4 * 3600, 12 * 3600)
_BATCH: Final = tuple(range(1, 11))


def _counter(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, text, labels)


RUNS = _counter(
    "runs",
    "Runs of tasks with the base class that have ended, but for those that a stopping worker cuts"
    " short.",
    *(*_TASK, "outcome"),
)
RETRIES = _counter(
    "retries",
    "Runs that are to be repeated. If the message is parked, it is a dead letter as well.",
    *_TASK,
)
DELAY = Instrument(
    "retry_delay_seconds", Kind.HISTOGRAM, "Delays asked of SQS for retries.", _TASK, _DELAYS
)
ATTEMPTS = Instrument(
    "attempts", Kind.HISTOGRAM, "Runs that a message needed to succeed.", _TASK, _ATTEMPTS
)
DEAD_LETTERS = _counter(
    "dead_letters",
    "Messages given up. Without a dead-letter queue, or with on_give_up='fail', they are deleted.",
    *(*_TASK, "reason"),
)
DISCARDED = _counter(
    "discarded",
    "Messages of tasks with the base class, deleted because they had expired or were revoked.",
    *_TASK,
)
RUNNING = _gauge(
    "messages_running",
    "Messages whose task is running now, with the base class or without; not those that wait for a"
    " free process.",
    "queue",
)
WAITING = _gauge(
    "messages_waiting", "Messages that this worker has hidden and that are not due yet.", "queue"
)
OLDEST = _gauge(
    "oldest_waiting_seconds",
    "Age of the oldest message that waits, since it was sent, or since its ETA; 0 if none does.",
    "queue",
)
GIVING_UP = _gauge(
    "messages_giving_up",
    "Waiting messages whose retry_for is over within two hours, and three quarters of it are used"
    " up.",
    "queue",
)
RECEIVED = _counter("received", "Messages received.", "queue")
RECEIVES = _counter("receives", "ReceiveMessage calls that SQS has answered.", "queue")
RECEIVE_FAILURES = _counter(
    "receive_failures", "ReceiveMessage calls that failed.", "queue", "code"
)
POLL_AGE = _gauge(
    "poll_age_seconds",
    "Time since the last answered ReceiveMessage.",
    "queue",
)
CALLS = _counter("calls", "Batch calls to SQS, failed ones too.", "queue", "action")
CALL_FAILURES = _counter(
    "call_failures", "Entries of batch calls that SQS did not accept.", "queue", "action", "code"
)
BATCH = Instrument(
    "batch_entries", Kind.HISTOGRAM, "Entries of a batch call.", ("queue", "action"), _BATCH
)
RENEWALS = _counter("lease_renewals", "Entries to keep a running message hidden.", "queue")
LEASES_LOST = _counter("leases_lost", "Running messages that another worker may have.", *_TASK)
GIVEN_BACK = _counter("given_back", "Messages given back before their task started.", "queue")

PROVIDER_OPEN = _gauge(
    "provider_open",
    "Whether this worker takes the provider to be down, or limits its calls after an outage: 0 or"
    " 1, or with a key the tenants' number.",
    "provider",
)
PROVIDER_OPENED = _counter(
    "provider_opened", "Times that this worker took the provider to be down.", "provider"
)
PROVIDER_RATE = _gauge(
    "provider_rate",
    "Calls a second that this worker may make to a provider that recovers; over its tenants.",
    "provider",
)
PROVIDER_WAITING = _gauge(
    "provider_waiting",
    "Messages of the provider's that this worker could bring forward (hidden), or holds until"
    " their slot at its rate, or their turn while it recovers (in line).",
    *("provider", "state"),
)
RECALLED = _counter("recalled", "Hidden messages that were brought forward.", "provider")

INSTRUMENTS: Final = (
    *(RUNS, RETRIES, DELAY, ATTEMPTS, DEAD_LETTERS, DISCARDED),
    *(RUNNING, WAITING, OLDEST, GIVING_UP),
    *(RECEIVED, RECEIVES, RECEIVE_FAILURES, POLL_AGE),
    *(CALLS, CALL_FAILURES, BATCH, RENEWALS, LEASES_LOST, GIVEN_BACK),
    *(PROVIDER_OPEN, PROVIDER_OPENED, PROVIDER_RATE, PROVIDER_WAITING, RECALLED),
)
