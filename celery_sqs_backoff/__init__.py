"""Celery on Amazon SQS: a failing task keeps its message and comes back after a jittered delay."""

from .outcomes import NonRetryable, Outcome, Retryable, Verdict
from .policies import DecorrelatedJitter, EqualJitter, Exponential, FullJitter, Schedule
from .redrive import redrive
from .safe import Guard
from .task import SQSBackoffTask

__all__ = [
    "DecorrelatedJitter",
    "EqualJitter",
    "Exponential",
    "FullJitter",
    "Guard",
    "NonRetryable",
    "Outcome",
    "Retryable",
    "SQSBackoffTask",
    "Schedule",
    "Verdict",
    "redrive",
]
