"""Replay a dead-letter queue: an engine that never prints.

Import the function with ``from celery_sqs_backoff import redrive``. Import all other names from
this package: ``from celery_sqs_backoff.redrive import peek, RedriveReport``.
"""

from .api import redrive
from .errors import RedriveError, RedriveRefused, RedriveUnreachable
from .events import Ended, RedriveReport
from .look import Plan, peek

__all__ = [
    "Ended",
    "Plan",
    "RedriveError",
    "RedriveRefused",
    "RedriveReport",
    "RedriveUnreachable",
    "peek",
    "redrive",
]
