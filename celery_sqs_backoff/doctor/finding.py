"""What a rule reports: evidence, consequence, and a fix to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .facts import Facts

__all__ = ["Finding", "Fix", "Rule", "Severity"]


class Severity(Enum):
    """How bad it is. The value is what ``--format json`` prints."""

    ERROR = "error"  # messages are lost, repeated, or not processed
    WARNING = "warning"  # an outage, a deploy or a crash will make one of it
    INFO = "info"  # it costs money or surprises


@dataclass(frozen=True)
class Fix:
    """Commands that a person can paste. An empty text: this way there is none.

    Attributes:
        aws: a line for the AWS command line.
        terraform: an argument of the queue's resource in Terraform.
        text: what to change where neither helps, such as in the app's settings.
    """

    aws: str = ""
    terraform: str = ""
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one subject.

    Attributes:
        id: of the rule: a letter for the severity and a number that is never used again.
        severity: of the rule.
        subject: the queue, task or setting.
        evidence: what was read, what was expected, and how that was computed.
        consequence: what happens to messages if it stays so.
        fix: how to change it.
    """

    id: str
    severity: Severity
    subject: str
    evidence: str
    consequence: str
    fix: Fix = field(default_factory=Fix)

    def as_dict(self) -> dict[str, object]:
        """Return what ``--format json`` prints of it."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "subject": self.subject,
            "evidence": self.evidence,
            "consequence": self.consequence,
            "fix": {"aws": self.fix.aws, "terraform": self.fix.terraform, "text": self.fix.text},
        }


#: Subject, evidence, consequence, fix.
Report = tuple[str, str, str, Fix]


@dataclass(frozen=True)
class Rule:
    """One question, asked of all facts.

    Attributes:
        id: ``E`` (error), ``W`` (warning) or ``I`` (info) and a number, never used again.
        title: what is wrong, in a few words.
        why: the page of ``--explain``: why it matters, with the source of each number.
        ask: returns a report for each subject that has the fault.
        is_live: whether it needs facts that SQS or a store has to be asked for.
    """

    id: str
    title: str
    why: str
    ask: Callable[[Facts], Iterable[Report]]
    is_live: bool = True

    @property
    def severity(self) -> Severity:
        return {"E": Severity.ERROR, "W": Severity.WARNING, "I": Severity.INFO}[self.id[0]]

    def findings(self, facts: Facts) -> list[Finding]:
        """Ask the rule."""
        return [Finding(self.id, self.severity, *report) for report in self.ask(facts)]
