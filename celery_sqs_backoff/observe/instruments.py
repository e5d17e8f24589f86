"""The metrics, as a table over the worker's events. ``python -m tests.tables`` documents them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from .events import (
    DeadLettered,
    Discarded,
    Event,
    GivenBack,
    LeaseLost,
    ProviderPaused,
    Recalled,
    Received,
    ReceiveFailed,
    Retried,
    RunEnded,
    Settled,
)


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
        labels: their names. A counter's and a histogram's are fields of the event.
        event: that it counts; ``None``: a gauge, which is read when it is scraped.
        amount: what an event adds; ``None`` = nothing.
        buckets: of a histogram.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    event: type[Event] | None = None
    amount: Callable[[Any], float | None] = lambda event: 1
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Name on the page of metrics."""
        return f"sqs_backoff_{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


_TASK: Final = ("task", "queue")
_CALL: Final = ("queue", "action")


def _count(
    name: str,
    text: str,
    event: type[Event],
    *labels: str,
    amount: Callable[[Any], float | None] = lambda event: 1,
) -> Instrument:
    return Instrument(name, Kind.COUNTER, text, labels, event, amount)


def _histogram(
    name: str,
    text: str,
    event: type[Event],
    *labels: str,
    amount: Callable[[Any], float | None],
    buckets: tuple[float, ...],
) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, text, labels, event, amount, buckets)


def _gauge(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, text, labels)


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
POLL_AGE = _gauge("poll_age_seconds", "Time since the last answered ReceiveMessage.", "queue")
PROVIDER_STATE = _gauge(
    "provider_state",
    "Whether the provider is paused, or recovering: 0 or 1, or with a key the tenants' number.",
    *("provider", "state"),
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
    *("provider", "place"),
)

INSTRUMENTS: Final = (
    _count(
        "runs",
        "Runs of tasks with the base class that have ended, but for those that a stopping worker"
        " cuts short.",
        RunEnded,
        *(*_TASK, "outcome"),
    ),
    _count(
        "retries",
        "Runs that are to be repeated. If the message is parked, it is a dead letter as well.",
        Retried,
        *_TASK,
    ),
    _histogram(
        "retry_delay_seconds",
        "Delays asked of SQS for retries.",
        Retried,
        *_TASK,
        amount=lambda retry: retry.delay,
        buckets=(1, 4, 16, 60, 300, 900, 3600, 4 * 3600, 12 * 3600),
    ),
    _histogram(
        "attempts",
        "Runs that a message needed to succeed.",
        RunEnded,
        *_TASK,
        amount=lambda run: run.attempt if run.outcome == "succeeded" else None,
        buckets=(1, 2, 3, 5, 8, 13, 21, 34, 55, 89),
    ),
    _count(
        "dead_letters",
        "Messages given up. Without a dead-letter queue, or with on_give_up='fail', they are"
        " deleted.",
        DeadLettered,
        *(*_TASK, "reason"),
    ),
    _count(
        "discarded",
        "Messages of tasks with the base class, deleted because they had expired or were revoked.",
        Discarded,
        *_TASK,
    ),
    *(RUNNING, WAITING, OLDEST, GIVING_UP),
    _count("received", "Messages received.", Received, "queue", amount=lambda e: e.messages),
    _count("receives", "ReceiveMessage calls that SQS has answered.", Received, "queue"),
    _count("receive_failures", "ReceiveMessage calls that failed.", ReceiveFailed, "queue", "code"),
    POLL_AGE,
    _count("calls", "Batch calls to SQS, failed ones too.", Settled, *_CALL),
    _count(
        "call_failures",
        "Entries of batch calls that SQS did not accept.",
        Settled,
        *(*_CALL, "code"),
        amount=lambda call: call.failed or None,
    ),
    _histogram(
        "batch_entries",
        "Entries of a batch call.",
        Settled,
        *_CALL,
        amount=lambda call: call.entries,
        buckets=tuple(range(1, 11)),
    ),
    _count(
        "lease_renewals",
        "Entries to keep a running message hidden.",
        Settled,
        "queue",
        amount=lambda call: call.renewals or None,
    ),
    _count("leases_lost", "Running messages that another worker may have.", LeaseLost, *_TASK),
    _count("given_back", "Messages given back before their task started.", GivenBack, "queue"),
    *(PROVIDER_STATE, PROVIDER_RATE, PROVIDER_WAITING),
    _count(
        "provider_paused", "Times that this worker paused the provider.", ProviderPaused, "provider"
    ),
    _count(
        "recalled",
        "Hidden messages that were brought forward.",
        Recalled,
        "queue",
        amount=lambda recalled: len(recalled.message_ids),
    ),
)
