"""Find faults in a set-up that could lose or repeat messages.

``look`` reads facts from a Celery app, from SQS and from the app's store. ``facts`` defines the
types of these facts. The pure functions in ``rules`` find faults in the facts. A finding states the
evidence, the consequence and the fix.
"""

from __future__ import annotations

from .facts import AppFacts, ProjectFacts, QueueFacts, TaskFacts
from .finding import Finding, Fix, Rule, Severity
from .rules import RULES, examine, select_rules

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
    "examine",
    "select_rules",
]
