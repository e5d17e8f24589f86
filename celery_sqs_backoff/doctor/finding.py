"""Findings of rules, with evidence, consequence, and a fix to paste into a shell or Terraform."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from .facts import ProjectFacts, QueueFacts


class Severity(Enum):
    """How bad it is. The value is what ``--format json`` prints."""

    ERROR = "error"  # messages are lost, repeated, or not processed
    WARNING = "warning"  # an outage, a deploy or a crash will make one of it
    INFO = "info"  # no message is at risk, but it costs money or surprises


@dataclass(frozen=True)
class Fix:
    """Lines that a person can paste. An empty text means that there is no such line.

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
    """One thing that is wrong with one subject.

    Attributes:
        id: of the rule: a letter for the severity and a number that is never used again.
        severity: of the rule.
        subject: the queue, task or setting.
        evidence: the value read, the expected one, and how that was computed.
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
        """Return the fields that ``--format json`` prints."""
        return asdict(self) | {"severity": self.severity.value}


#: Subject, evidence, consequence, fix.
Report = tuple[str, str, str, Fix]


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    Attributes:
        id: ``E`` (error), ``W`` (warning) or ``I`` (info) and a number, never used again.
        title: the fault, in a few words.
        why: the page of ``--explain``: why it matters, with the source of each number.
        ask: returns a report for each subject that has it.
        is_live: whether its facts come from SQS or a store.
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


#: SQS's attribute names and Terraform's arguments of ``aws_sqs_queue``.
#: https://registry.terraform.io/providers/hashicorp/aws/latest/docs/resources/sqs_queue
_TERRAFORM = {
    "DelaySeconds": "delay_seconds",
    "MaximumMessageSize": "max_message_size",
    "MessageRetentionPeriod": "message_retention_seconds",
    "RedriveAllowPolicy": "redrive_allow_policy",
    "RedrivePolicy": "redrive_policy",
    "VisibilityTimeout": "visibility_timeout_seconds",
}


def aws_sqs(action: str, queue: QueueFacts) -> str:
    """Return the start of an ``aws sqs`` command.

    It names the Region, because the command line ignores the one in the URL.
    """
    return f"aws sqs {action}" + (f" --region {queue.region}" if queue.region else "")


def set_attribute(
    queue: QueueFacts, name: str, value: int | str | Mapping[str, object], text: str = ""
) -> Fix:
    """Set one attribute of a queue.

    Args:
        queue: the queue.
        name: of the attribute on SQS.
        value: a policy as a mapping. An empty text removes a policy; Terraform would
            not change it if the configuration had ``null``.
        text: another step to take.
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
    """Return the command that creates a queue of the same type and in the same Region.

    Args:
        queue: the queue that it belongs to.
        name: of the new queue.
        attributes: in the shorthand of the command line.
    """
    if queue.is_fifo:
        attributes = (*attributes, "FifoQueue=true")
    line = f"{aws_sqs('create-queue', queue)} --queue-name {name}"
    return line + (f" --attributes {','.join(attributes)}" if attributes else "")
