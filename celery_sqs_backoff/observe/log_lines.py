"""The log lines of a worker: a fold over its events, one line at most for each.

What would be said again and again, such as a refused action, is said once per queue. Everything is
in the text itself: Celery's formatter drops ``extra``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger

from ..retry.outcomes import Outcome
from ..text import printable
from .events import (
    CountRefused,
    DeadLettered,
    Event,
    HeldTooLong,
    LeaseLost,
    OfProvider,
    OfTask,
    Parked,
    ProviderClosed,
    ProviderOpened,
    ProviderProbing,
    ProviderRecovered,
    ProviderSlowed,
    ReceiveFailed,
    ReceivingAgain,
    RenewalRefused,
    Retried,
    SettlementFailed,
    SettlementRefused,
)
from .stream import Events

__all__ = ["LogLines", "logged_events"]

logger = get_logger(__name__)


def logged_events() -> Events:
    """Return a stream that is logged."""
    events = Events()
    events.subscribe(LogLines())
    return events


class LogLines:
    """Writes the lines: a listener of :class:`.stream.Events`."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str, str]] = set()
        self._lines: dict[type[Event], Callable[[Any], None]] = {
            ReceiveFailed: _receive_failed,
            ReceivingAgain: _receiving_again,
            Retried: _retried,
            DeadLettered: _dead_lettered,
            Parked: _parked,
            LeaseLost: _lease_lost,
            RenewalRefused: _renewal_refused,
            HeldTooLong: _held_too_long,
            SettlementFailed: _settlement_failed,
            SettlementRefused: self._settlement_refused,
            CountRefused: self._count_refused,
            ProviderOpened: _provider_opened,
            ProviderProbing: _provider_probing,
            ProviderSlowed: _provider_slowed,
            ProviderClosed: _provider_closed,
            ProviderRecovered: _provider_recovered,
        }

    def __call__(self, event: Event) -> None:
        """Write the event's line, if it has one."""
        if (line := self._lines.get(type(event))) is not None:
            line(event)

    def _settlement_refused(self, event: SettlementRefused) -> None:
        if self._is_news(event.queue, event.action, event.code):
            logger.error(
                "SQS refuses to %s for queue %s (%s). Messages stay where they are until it does"
                " not. This is said once per queue.",
                event.action,
                event.queue,
                event.code,
            )

    def _count_refused(self, event: CountRefused) -> None:
        if self._is_news(event.queue, "count", event.code):
            logger.warning(
                "Cannot read how many messages of queue %s are in flight (%s): messages will"
                " not be parked before SQS's quota is reached. This is said once per queue.",
                event.queue,
                event.code,
            )

    def _is_news(self, *key: str) -> bool:
        queue, what, code = key
        is_news = (queue, what, code) not in self._said
        self._said.add((queue, what, code))
        return is_news


def _receive_failed(event: ReceiveFailed) -> None:
    if event.failures == 1:
        logger.warning(
            "sqs_backoff.receive_failed: queue %s: %s; trying again until it works",
            event.queue,
            event.code,
        )


def _receiving_again(event: ReceivingAgain) -> None:
    logger.info(
        "sqs_backoff.receiving_again: queue %s, after %d failure(s)", event.queue, event.failures
    )


def _retried(event: Retried) -> None:
    left = "unlimited" if event.budget_left is None else event.budget_left
    text, extra = _described(
        event,
        attempt=event.attempt,
        outcome=Outcome(event.outcome).name,
        reason=event.reason,
        error=event.error,
        delay=int(event.delay),
        budget_left=left,
    )
    logger.info("sqs_backoff.retry: %s", text, extra=extra)


def _dead_lettered(event: DeadLettered) -> None:
    text, extra = _described(
        event,
        attempt=event.attempt,
        outcome=None if event.outcome is None else Outcome(event.outcome).name,
        reason=event.reason,
        error=event.error,
    )
    if event.is_kept:
        logger.warning("sqs_backoff.dead_letter: %s", text, extra=extra)
    else:
        logger.warning("sqs_backoff.deleted: %s", text, extra=extra)


def _parked(event: Parked) -> None:
    text, extra = _described(event)
    logger.warning("sqs_backoff.parked: %s", text, extra=extra)


def _lease_lost(event: LeaseLost) -> None:
    text, extra = _described(event)
    logger.warning(
        "sqs_backoff.may_run_twice: %s: another worker may be running it", text, extra=extra
    )


def _renewal_refused(event: RenewalRefused) -> None:
    logger.error(
        "sqs_backoff.lease_lost: message %s of %s is no longer ours (%s)",
        event.message_id,
        event.queue,
        event.code,
    )


def _held_too_long(event: HeldTooLong) -> None:
    logger.error(
        "sqs_backoff.twelve_hours: message %s of %s is held for longer than SQS allows",
        event.message_id,
        event.queue,
    )


def _settlement_failed(event: SettlementFailed) -> None:
    logger.warning(
        "sqs_backoff.lease_gone: cannot %s message %s on %s: %s",
        event.action,
        event.message_id,
        event.queue,
        event.code or "its visibility timeout is over",
    )


def _described(event: OfTask, **facts: object) -> tuple[str, dict[str, object]]:
    named = {"task": event.task, "id": event.task_id, "queue": event.queue, **facts}
    known = {name: value for name, value in named.items() if value is not None}
    text = " ".join(f"{name}={_quoted(value)}" for name, value in known.items())
    return text, {f"sqs_backoff.{name}": value for name, value in known.items()}


def _quoted(value: object) -> str:
    text = printable(value)
    return f'"{text}"' if " " in text or not text else text


def _provider(event: OfProvider) -> str:
    name = f"{event.provider}[{event.tenant}]" if event.tenant else event.provider
    return printable(name)


def _found(event: ProviderOpened | ProviderClosed) -> str:
    return "another worker has found out" if event.is_told else "found out here"


def _provider_opened(event: ProviderOpened) -> None:
    logger.warning(
        "sqs_backoff.provider_down: %s: its messages are hidden without running, but for probes;"
        " %s",
        _provider(event),
        _found(event),
    )


def _provider_slowed(event: ProviderSlowed) -> None:
    logger.warning(
        "sqs_backoff.provider_slowed: %s: it refuses calls; they are limited, from two a second on",
        _provider(event),
    )


def _provider_probing(event: ProviderProbing) -> None:
    logger.info("sqs_backoff.provider_probing: %s: one message runs", _provider(event))


def _provider_closed(event: ProviderClosed) -> None:
    logger.info(
        "sqs_backoff.provider_up: %s: %d messages are brought forward; %s",
        _provider(event),
        event.waiting,
        _found(event),
    )


def _provider_recovered(event: ProviderRecovered) -> None:
    logger.info(
        "sqs_backoff.provider_recovered: %s: %d messages were brought forward",
        _provider(event),
        event.recalled,
    )
