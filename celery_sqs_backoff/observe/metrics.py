"""From the events of one worker to numbers, which a recorder keeps.

Counted in the worker's main process, so no multiprocess mode is needed. Labels are task, queue,
outcome, reason, error code and SQS's action; never a text of an exception.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from . import instruments
from .events import (
    DeadLettered,
    Discarded,
    Event,
    GaveBack,
    LeaseLost,
    Parked,
    ProviderClosed,
    ProviderOpened,
    Recalled,
    Received,
    ReceiveFailed,
    ReceivingPaused,
    Retried,
    RunEnded,
    Settled,
)
from .instruments import Instrument
from .waiting import Waiting

__all__ = ["GIVING_UP_SECONDS", "Metrics", "Readings", "Recorder"]

#: How far ahead "gives up soon" looks.
GIVING_UP_SECONDS: Final = 2 * 3600.0

#: Label values, and the number.
Readings = Iterable[tuple[tuple[str, ...], float]]


class Recorder(Protocol):
    """Who keeps the numbers. Must return at once."""

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """Add to a counter, or enter a value of a histogram."""

    def read_by(self, instrument: Instrument, read: Callable[[], Readings]) -> None:
        """Ask ``read`` for a gauge whenever somebody looks."""


class Metrics:
    """Folds events into numbers: a listener of :class:`.stream.Events`.

    Args:
        recorder: who keeps them.
        waiting: the same worker's fold of what waits.
        running: how many tasks of a queue the pool is running.
        waiting_for: what waits for providers, by provider and state.
        clock: seconds, monotonic.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        recorder: Recorder,
        waiting: Waiting,
        *,
        running: Callable[[str], int] = lambda queue: 0,
        waiting_for: Callable[[], Readings] = tuple,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._add = recorder.add
        self._waiting = waiting
        self._running = running
        self._clock = clock
        self._now = now
        self._last_receive: dict[str, float] = {}
        self._open: dict[str, set[str]] = defaultdict(set)  # tenants by provider
        self._folds: dict[type[Event], Callable[[Any], None]] = {
            Received: self._on_received,
            ReceiveFailed: lambda e: self._add(instruments.RECEIVE_FAILURES, 1, e.queue, e.code),
            ReceivingPaused: self._on_receiving_paused,
            RunEnded: self._on_run_ended,
            Retried: self._on_retried,
            DeadLettered: lambda e: self._dead_letter(e, e.reason),
            Parked: lambda e: self._dead_letter(e, "parked"),
            Discarded: lambda e: self._add(instruments.DISCARDED, 1, e.task, e.queue),
            GaveBack: lambda e: self._add(instruments.GIVEN_BACK, 1, e.queue),
            LeaseLost: lambda e: self._add(instruments.LEASES_LOST, 1, e.task, e.queue),
            Settled: self._on_settled,
            ProviderOpened: self._on_opened,
            ProviderClosed: lambda e: self._open[e.provider].discard(e.tenant),
            Recalled: lambda e: self._add(instruments.RECALLED, e.messages, e.provider),
        }
        recorder.read_by(instruments.PROVIDER_OPEN, self._open_gates)
        recorder.read_by(instruments.PROVIDER_WAITING, waiting_for)
        for instrument, read in (
            (instruments.RUNNING, self._running),
            (instruments.WAITING, waiting.count),
            (instruments.OLDEST, self._oldest),
            (instruments.GIVING_UP, self._giving_up),
            (instruments.POLL_AGE, self._poll_age),
        ):
            recorder.read_by(instrument, self._by_queue(read))

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if event.queue and event.queue not in self._last_receive:
            self._last_receive[event.queue] = self._clock()
        if (fold := self._folds.get(type(event))) is not None:
            fold(event)

    def _by_queue(self, read: Callable[[str], float]) -> Callable[[], Readings]:
        return lambda: [((queue,), float(read(queue))) for queue in list(self._last_receive)]

    def _open_gates(self) -> Readings:
        return [((provider,), float(len(open_))) for provider, open_ in list(self._open.items())]

    def _on_opened(self, event: ProviderOpened) -> None:
        self._open[event.provider].add(event.tenant)
        self._add(instruments.PROVIDER_OPENED, 1, event.provider)

    def _oldest(self, queue: str) -> float:
        due_at = self._waiting.now(queue, at=0, horizon=0).oldest_due_at
        return 0.0 if due_at is None else max(0.0, self._now() - due_at)

    def _giving_up(self, queue: str) -> float:
        waiting = self._waiting.now(queue, at=self._now(), horizon=GIVING_UP_SECONDS)
        return waiting.nearly_given_up

    def _poll_age(self, queue: str) -> float:
        return self._clock() - self._last_receive[queue]

    def _on_received(self, event: Received) -> None:
        self._last_receive[event.queue] = self._clock()
        self._add(instruments.RECEIVES, 1, event.queue)
        self._add(instruments.RECEIVED, event.messages, event.queue)

    def _on_receiving_paused(self, event: ReceivingPaused) -> None:
        self._last_receive[event.queue] = self._clock()  # else its pause would alarm somebody

    def _on_run_ended(self, event: RunEnded) -> None:
        self._add(instruments.RUNS, 1, event.task, event.queue, event.outcome)
        if event.outcome == "succeeded":
            self._add(instruments.ATTEMPTS, event.attempt, event.task, event.queue)

    def _on_retried(self, event: Retried) -> None:
        self._add(instruments.RETRIES, 1, event.task, event.queue)
        self._add(instruments.DELAY, event.delay, event.task, event.queue)

    def _dead_letter(self, event: DeadLettered | Parked, reason: str) -> None:
        self._add(instruments.DEAD_LETTERS, 1, event.task, event.queue, reason)

    def _on_settled(self, event: Settled) -> None:
        self._add(instruments.CALLS, 1, event.queue, event.operation)
        self._add(instruments.BATCH, event.entries, event.queue, event.operation)
        if event.renewals:
            self._add(instruments.RENEWALS, event.renewals, event.queue)
        if event.failed:
            code = event.code or "unknown"
            self._add(instruments.CALL_FAILURES, event.failed, event.queue, event.operation, code)
