"""What a user's type checker sees: this file is checked by mypy and never run."""

from __future__ import annotations

from datetime import timedelta

from celery_sqs_backoff import Exponential, FullJitter, Outcome, Schedule, Verdict
from celery_sqs_backoff.policies import Policy

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
