"""Write the lines that correct a queue, for the AWS command line and for Terraform."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..facts import QueueFacts
from ..finding import Fix

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
        value: a policy as a mapping. An empty text removes a policy; Terraform would leave it as it
            is if the configuration had ``null``.
        text: what to do beside it.
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
