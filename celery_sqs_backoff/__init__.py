"""Celery on Amazon SQS: a failing task keeps its message and comes back after a jittered delay."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .provider import Provider
from .retry.outcomes import NonRetryable, Outcome, Retryable, Verdict
from .retry.policies import (
    DecorrelatedJitter,
    EqualJitter,
    Exponential,
    FullJitter,
    Policy,
    Schedule,
)
from .safe import Guard
from .safe.task import SQSBackoffTask, WorkflowTask

if TYPE_CHECKING:
    from .redrive import redrive

__all__ = [
    "DecorrelatedJitter",
    "EqualJitter",
    "Exponential",
    "FullJitter",
    "Guard",
    "NonRetryable",
    "Outcome",
    "Policy",
    "Provider",
    "Retryable",
    "SQSBackoffTask",
    "Schedule",
    "Verdict",
    "WorkflowTask",
    "redrive",
]


class _Package(ModuleType):
    """Imports ``redrive``, and with it boto3, on first use, because tasks do not need it.

    A ``__getattr__`` of the module would not suffice. A subpackage has the same name as the
    function, and importing it sets the attribute to the subpackage.
    """

    @property
    def redrive(self) -> Any:
        from .redrive.api import redrive

        return redrive

    @redrive.setter
    def redrive(self, subpackage: ModuleType) -> None:
        """Ignore the subpackage, because ``celery_sqs_backoff.redrive`` is the function."""


sys.modules[__name__].__class__ = _Package
