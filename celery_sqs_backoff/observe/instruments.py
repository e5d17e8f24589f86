"""The metrics, as a table over the worker's events. ``python -m tests.tables`` documents them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from .events import (
    DeadLettered,
    Discarded,
    Event,
    GivenBack,
    LeaseLost,
    Polled,
    ProviderPaused,
    Recalled,
    ReceiveFailed,
    Retried,
    RunEnded,
    Settled,
)


@dataclass(frozen=True)
class Instrument:
    """One metric.

    Attributes:
        name: without the prefix ``sqs_backoff``, and without Prometheus' ``_total``.
        labels: their names. A counter's and a histogram's are fields of the event.
        text: its meaning, as a sentence.
        event: that it counts; ``None``: a gauge, which is read when it is scraped.
        amount: the number that an event adds; ``None`` = 0.
        buckets: of a histogram; empty = not a histogram.
    """

    name: str
    labels: tuple[str, ...]
    text: str
    event: type[Event] | None = None
    amount: Callable[[Any], float | None] = lambda event: 1
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Kind, as Prometheus calls it."""
        if self.event is None:
            return "gauge"
        return "histogram" if self.buckets else "counter"

    @property
    def prometheus_name(self) -> str:
        """Name on the page of metrics."""
        return f"sqs_backoff_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _of_events(
    name: str,
    labels: str,
    event: type[Event],
    text: str,
    amount: Callable[[Any], float | None] = lambda event: 1,
    buckets: tuple[float, ...] = (),
) -> Instrument:
    return Instrument(name, tuple(labels.split()), text, event, amount, buckets)


def _gauge(name: str, labels: str, text: str) -> Instrument:
    return Instrument(name, tuple(labels.split()), text)


RUNNING = _gauge(
    "messages_running",
    "queue",
    "Messages whose task is running now, with the base class or without.",
)
WAITING = _gauge(
    "messages_waiting", "queue", "Messages that this worker has hidden and that are not due yet."
)
OLDEST = _gauge(
    "oldest_waiting_seconds",
    "queue",
    "Age of the oldest message that waits, since it was sent, or since its ETA; 0 if none does.",
)
GIVING_UP = _gauge(
    "messages_giving_up",
    "queue",
    "Waiting messages whose retry_for is over within two hours, with at most a quarter of it left.",
)
POLL_AGE = _gauge("poll_age_seconds", "queue", "Time since the last answered ReceiveMessage.")
PROVIDER_STATE = _gauge(
    "provider_state",
    "provider state",
    "Whether the provider is paused, or recovering: 0 or 1, or with a key the number of tenants.",
)
PROVIDER_RATE = _gauge(
    "provider_rate",
    "provider",
    "Calls a second that this worker may make to a provider that recovers.",
)
PROVIDER_WAITING = _gauge(
    "provider_waiting",
    "provider place",
    "Messages for the provider that this worker has hidden, or holds in line for their turn.",
)
OF_PROVIDERS: Final = (PROVIDER_STATE, PROVIDER_RATE, PROVIDER_WAITING)

INSTRUMENTS: Final = (
    _of_events(
        "runs",
        "task queue outcome",
        RunEnded,
        "Runs of tasks with the base class that ended, without those that a stopping worker cut"
        " short.",
    ),
    _of_events("retries", "task queue", Retried, "Runs that are to be repeated."),
    _of_events(
        "retry_delay_seconds",
        "task queue",
        Retried,
        "Delays asked of SQS for retries.",
        lambda retry: retry.delay,
        (1, 4, 16, 60, 300, 900, 3600, 4 * 3600, 12 * 3600),
    ),
    _of_events(
        "attempts",
        "task queue",
        RunEnded,
        "Runs that a message needed to succeed.",
        lambda run: run.attempt if run.outcome == "succeeded" else None,
        (1, 2, 3, 5, 8, 13, 21, 34, 55, 89),
    ),
    _of_events(
        "dead_letters",
        "task queue reason",
        DeadLettered,
        "Messages given up. Without a dead-letter queue, or with on_give_up='fail', they are"
        " deleted.",
    ),
    _of_events(
        "discarded",
        "task queue",
        Discarded,
        "Messages of tasks with the base class, deleted because they had expired or were revoked.",
    ),
    *(RUNNING, WAITING, OLDEST, GIVING_UP),
    _of_events("received", "queue", Polled, "Messages received.", lambda e: len(e.message_ids)),
    _of_events("receives", "queue", Polled, "ReceiveMessage calls that SQS answered."),
    _of_events(
        "receive_failures", "queue code", ReceiveFailed, "ReceiveMessage calls that failed."
    ),
    POLL_AGE,
    _of_events("calls", "queue action", Settled, "Batch calls to SQS, with those that failed."),
    _of_events(
        "call_failures",
        "queue action code",
        Settled,
        "Entries of batch calls that SQS did not accept.",
        lambda call: call.failed or None,
    ),
    _of_events("leases_lost", "task queue", LeaseLost, "Running messages that others may have."),
    _of_events("given_back", "queue", GivenBack, "Messages given back before their task started."),
    *OF_PROVIDERS,
    _of_events("provider_paused", "provider", ProviderPaused, "Pauses of the provider."),
    _of_events(
        "recalled",
        "queue",
        Recalled,
        "Hidden messages that were brought forward.",
        lambda recalled: len(recalled.message_ids),
    ),
)
