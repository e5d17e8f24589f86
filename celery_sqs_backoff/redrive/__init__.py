"""Replay a dead-letter queue from Python. This package prints nothing.

Import the function ``redrive`` from ``celery_sqs_backoff``. Import all other names from this
package, as in ``from celery_sqs_backoff.redrive import peek, RedriveReport``.
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
