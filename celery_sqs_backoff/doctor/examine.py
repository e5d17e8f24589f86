"""Ask every rule, leave out what the user has chosen to live with."""

from __future__ import annotations

from collections.abc import Collection

from .facts import Facts
from .finding import Finding, Rule, Severity
from .rules import RULES

__all__ = ["asked", "examine"]

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


def asked(*, live: bool) -> list[Rule]:
    """Return the rules: all, or those that need no facts from SQS or a store."""
    return [rule for rule in RULES if live or not rule.is_live]


def examine(facts: Facts, *, ignore: Collection[str] = (), live: bool = True) -> list[Finding]:
    """Return what is wrong, the worst first.

    Arguments:
        facts: what was read.
        ignore: ids of rules to leave out, or ``id:subject`` for one subject.
        live: whether to ask the rules that need facts from SQS or a store.
    """
    found = {
        finding: None  # once, of a dead-letter queue that several queues have
        for rule in asked(live=live)
        for finding in rule.findings(facts)
        if finding.id not in ignore and f"{finding.id}:{finding.subject}" not in ignore
    }
    return sorted(found, key=lambda f: (_ORDER[f.severity], f.id, f.subject))
