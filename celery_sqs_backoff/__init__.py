"""Retry failed Celery tasks on Amazon SQS by hiding their messages for a delay with jitter."""

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
    """The class of this module. It imports the function ``redrive`` and boto3 only on first use.

    Tasks do not need the function or boto3. A ``__getattr__`` of the module would not suffice,
    because Python calls it only for a missing attribute. The attribute ``redrive`` is not missing
    once the subpackage ``redrive`` is imported. Python has then set it to the subpackage.
    """

    @property
    def redrive(self) -> Any:
        from .redrive.api import redrive

        return redrive

    @redrive.setter
    def redrive(self, subpackage: ModuleType) -> None:
        """Ignore the subpackage that Python sets on import. The attribute stays the function."""


sys.modules[__name__].__class__ = _Package
