"""Each line is written for its event, and what repeats is said once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from celery_sqs_backoff.observe.events import (
    DeadLettered,
    Discarded,
    HeldTooLong,
    LeaseLost,
    ProviderRecovering,
    ReceiveFailed,
    ReceivingAgain,
    RenewalRefused,
    Retried,
    SettlementFailed,
    SettlementRefused,
    WorkerEvent,
)
from celery_sqs_backoff.observe.log_lines import LogLines

OF_TASK: dict[str, Any] = {"queue": "q", "task": "shop.mail", "task_id": "5f", "message_id": "m"}
RETRIED: dict[str, Any] = {
    **OF_TASK,
    **{"delay": 7.0, "attempt": 3, "outcome": "retryable", "reason": "process lost"},
}


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (
            Retried(**RETRIED, error="smtplib.SMTPServerDisconnected", budget_left=129_581),
            "INFO",
            "sqs_backoff.retry: task=shop.mail id=5f queue=q attempt=3 outcome=RETRYABLE"
            ' reason="process lost" error=smtplib.SMTPServerDisconnected delay=7'
            " budget_left=129581",
        ),
        (
            Retried(**RETRIED),
            "INFO",
            "sqs_backoff.retry: task=shop.mail id=5f queue=q attempt=3 outcome=RETRYABLE"
            ' reason="process lost" delay=7 budget_left=unlimited',
        ),
        (
            DeadLettered(**OF_TASK, reason="not retryable", outcome="not processed", attempt=1),
            "WARNING",
            "sqs_backoff.dead_letter: task=shop.mail id=5f queue=q attempt=1"
            ' outcome=NOT_PROCESSED reason="not retryable"',
        ),
        (
            DeadLettered(**OF_TASK, reason="revoked", outcome=None, attempt=1, is_kept=False),
            "WARNING",
            "sqs_backoff.dead_letter: task=shop.mail id=5f queue=q attempt=1 reason=revoked:"
            " deleted (no dead-letter queue, or on_give_up is 'fail')",
        ),
        (
            LeaseLost(**OF_TASK),
            "ERROR",
            "sqs_backoff.lease_lost: task=shop.mail id=5f queue=q:"
            " another worker may be running it",
        ),
        (
            RenewalRefused(queue="q", message_id="m", code="ReceiptHandleIsInvalid"),
            "WARNING",
            "sqs_backoff.renewal_refused: this worker no longer holds message m of q"
            " (ReceiptHandleIsInvalid)",
        ),
        (
            HeldTooLong(queue="q", message_id="m"),
            "ERROR",
            "sqs_backoff.held_too_long: message m of q is held for longer than SQS allows",
        ),
        (
            SettlementFailed(queue="q", message_id="m", action="delete", code=None),
            "WARNING",
            "sqs_backoff.settlement_failed: cannot delete message m on q: its visibility timeout is"
            " over",
        ),
        (
            ReceiveFailed(queue="q", code="ServiceUnavailable", failures=1),
            "WARNING",
            "sqs_backoff.receive_failed: queue q: ServiceUnavailable; trying again until it works",
        ),
        (
            ReceivingAgain(queue="q", failures=6),
            "INFO",
            "sqs_backoff.receiving_again: queue q, after 6 failure(s)",
        ),
        (
            ProviderRecovering(provider="mailgun", tenant="5f", rate=2.04, waiting=31),
            "INFO",
            "sqs_backoff.provider_recovering: mailgun[5f]: 2.0 calls a second, 31 messages wait",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, WorkerEvent) else "",
)
def test_line(event, level, line, caplog):
    """Each event is logged with its level and line."""
    caplog.set_level(logging.INFO)
    LogLines()(event)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, line)]


def test_facts_in_record(caplog):
    """The facts of a line are also in the log record."""
    caplog.set_level(logging.INFO)
    LogLines()(Retried(**RETRIED))
    found = {k: v for k, v in vars(caplog.records[0]).items() if k.startswith("sqs_backoff.")}
    assert found["sqs_backoff.delay"] == 7
    assert found["sqs_backoff.task"] == "shop.mail"


def test_forged_line(caplog):
    """A task name from a sender cannot forge a line."""
    LogLines()(LeaseLost(**OF_TASK | {"task": "a\nsqs_backoff.started: forged"}))
    assert "\n" not in caplog.records[0].getMessage()


def test_refusal_is_logged_once(caplog):
    """A refusal that an operator has to repair is logged once per queue."""
    lines = LogLines()
    event = SettlementRefused(queue="q", action="delete messages", code="AccessDenied")
    for _ in range(3):
        lines(event)
    assert len(caplog.records) == 1
    lines(replace(event, queue="another"))
    assert len(caplog.records) == 2


def test_outage_is_logged_once(caplog):
    """An outage is logged when it begins, and not again while it lasts."""
    lines = LogLines()
    for failures in range(1, 6):
        lines(ReceiveFailed(queue="q", code="ServiceUnavailable", failures=failures))
    assert len(caplog.records) == 1


def test_event_without_line(caplog):
    """An event without a line writes nothing to the log."""
    caplog.set_level(logging.DEBUG)
    LogLines()(Discarded(**OF_TASK))
    assert caplog.records == []
