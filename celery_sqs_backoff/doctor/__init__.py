"""The doctor finds faults of a set-up before it loses a message, by pure rules over facts.

``look`` reads the facts from SQS and from a Celery app, ``facts`` holds them, and ``rules`` finds
the faults in them. A finding states evidence, its consequence in an outage, and the fix.
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
