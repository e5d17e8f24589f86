"""Define rules and findings, and the commands and Terraform lines that fix a fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from .facts import ProjectFacts, QueueFacts


class Severity(Enum):
    """Severity of a finding. ``--format json`` prints the value."""

    ERROR = "error"  # messages are lost, repeated, or not processed
    WARNING = "warning"  # an outage, a deploy or a crash will turn the fault into an error
    INFO = "info"  # no message is at risk, but the fault costs money or surprises the user


@dataclass(frozen=True)
class Fix:
    """A fix for a person to paste. Each text may be empty.

    Attributes:
        aws: a line for the AWS command line.
        terraform: an argument of the queue's resource in Terraform.
        text: the change to make elsewhere, such as in the app's settings.
    """

    aws: str = ""
    terraform: str = ""
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """One fault of one queue, task or setting.

    Attributes:
        id: ID of the rule.
        severity: severity of the rule.
        subject: name of the queue, task or setting.
        evidence: the actual value, the expected value, and the reason for the expected value.
        consequence: the effect on messages if the fault is not fixed.
        fix: how to fix the fault.
    """

    id: str
    severity: Severity
    subject: str
    evidence: str
    consequence: str
    fix: Fix = field(default_factory=Fix)

    def as_dict(self) -> dict[str, object]:
        """Return the fields that ``--format json`` prints."""
        return asdict(self) | {"severity": self.severity.value}


#: Subject, evidence, consequence and fix of a finding.
Report = tuple[str, str, str, Fix]


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    Attributes:
        id: ``E`` (error), ``W`` (warning) or ``I`` (info), and a number that no other rule ever
            gets.
        title: the fault, in a few words.
        why: the text of ``--explain``. It says why the fault matters, and gives the source of each
            number that it quotes.
        ask: returns a report for each subject that has the fault.
        is_live: whether the rule needs facts from SQS or a store.
    """

    id: str
    title: str
    why: str
    ask: Callable[[ProjectFacts], Iterable[Report]]
    is_live: bool = True

    @property
    def severity(self) -> Severity:
        return {"E": Severity.ERROR, "W": Severity.WARNING, "I": Severity.INFO}[self.id[0]]

    def findings(self, facts: ProjectFacts) -> list[Finding]:
        """Return a finding for each subject that has the fault."""
        return [Finding(self.id, self.severity, *report) for report in self.ask(facts)]


#: Terraform's argument of ``aws_sqs_queue`` for each attribute of SQS.
#: https://registry.terraform.io/providers/hashicorp/aws/latest/docs/resources/sqs_queue
_TERRAFORM = {
    "DelaySeconds": "delay_seconds",
    "MessageRetentionPeriod": "message_retention_seconds",
    "RedrivePolicy": "redrive_policy",
    "VisibilityTimeout": "visibility_timeout_seconds",
}


def aws_sqs(action: str, queue: QueueFacts) -> str:
    """Return the start of an ``aws sqs`` command.

    The command has a ``--region``, because the command line ignores the Region in the queue's URL.
    """
    return f"aws sqs {action}" + (f" --region {queue.region}" if queue.region else "")


def set_attribute(
    queue: QueueFacts, name: str, value: int | str | Mapping[str, object], text: str = ""
) -> Fix:
    """Return the fix that sets one attribute of a queue.

    Args:
        queue: the queue to change.
        name: name of the attribute on SQS.
        value: the new value. A policy is a mapping. An empty text removes a policy, on SQS and in
            Terraform. (``null`` in Terraform would leave the policy unchanged.)
        text: a further step for the user. May be empty.
    """
    if isinstance(value, Mapping):
        plain = json.dumps(value)
        argument = f"jsonencode({plain})"
    else:
        plain, argument = str(value), json.dumps(value)
    return Fix(
        aws=(
            f"{aws_sqs('set-queue-attributes', queue)} --queue-url {queue.url}"
            f" --attributes '{json.dumps({name: plain})}'"
        ),
        terraform=f"{_TERRAFORM[name]} = {argument}",
        text=text,
    )


def create_queue(queue: QueueFacts, name: str, *attributes: str) -> str:
    """Return the command that creates a queue with the type and Region of an existing queue.

    Args:
        queue: the existing queue.
        name: name of the new queue.
        attributes: attributes in the command line's shorthand, such as ``"DelaySeconds=5"``.
    """
    if queue.is_fifo:
        attributes = (*attributes, "FifoQueue=true")
    line = f"{aws_sqs('create-queue', queue)} --queue-name {name}"
    return line + (f" --attributes {','.join(attributes)}" if attributes else "")
