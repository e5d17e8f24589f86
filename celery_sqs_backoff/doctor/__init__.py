"""What is wrong with a set-up, before it loses a message: pure rules over facts that others read.

``facts`` holds what was read, ``rules`` says what is wrong with it, ``look`` reads it from SQS and
from a Celery app. A finding states evidence, its consequence in an outage, and the fix.
"""

from __future__ import annotations

from .facts import AppFacts, ProjectFacts, QueueFacts, TaskFacts
from .finding import Finding, Fix, Rule, Severity
from .rules import RULES, asked, examine

__all__ = [
    "RULES",
    "AppFacts",
    "Finding",
    "Fix",
    "ProjectFacts",
    "QueueFacts",
    "Rule",
    "Severity",
    "TaskFacts",
    "asked",
    "examine",
]
