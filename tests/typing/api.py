"""Use the public names with types, as a user's code does. mypy only checks this file."""

from __future__ import annotations

from datetime import timedelta

from celery_sqs_backoff import (
    Exponential,
    FullJitter,
    Outcome,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.retry.policies import Policy

policies: list[Policy] = [
    FullJitter(base=2, cap=timedelta(hours=1)),
    Exponential(base=1, cap=60),
    Schedule([1, 2, timedelta(minutes=5)]),
]


def by_status(exc: BaseException) -> Outcome | Verdict | None:
    if isinstance(exc, ConnectionRefusedError):
        return Outcome.RETRYABLE
    if isinstance(exc, TimeoutError):
        return Verdict(Outcome.RETRYABLE, retry_after=30)
    return None


def unset(
    task: SQSBackoffTask, exc: BaseException, args: tuple[object, ...], kwargs: object
) -> None:
    """Take the arguments with which ``on_not_processed`` is called."""


class MailTask(SQSBackoffTask):
    abstract = True
    backoff = FullJitter(base=2, cap=3600)
    retry_for = timedelta(hours=36)
    retry_on = (ConnectionRefusedError,)
    classify = (by_status,)
    on_not_processed = staticmethod(unset)
    on_give_up = "fail"
    crash_budget = 1
    fifo_cap = timedelta(minutes=5)
    park_above = None
