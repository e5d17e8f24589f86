"""Fixes that several rules share: attributes of one queue, for the command line and Terraform."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..facts import QueueFacts
from ..finding import Fix

__all__ = ["aws_sqs", "resource_name", "set_attributes", "terraform", "without_redrive_policy"]

#: SQS's attribute names and Terraform's arguments of ``aws_sqs_queue``.
#: https://registry.terraform.io/providers/hashicorp/aws/latest/docs/resources/sqs_queue
_TERRAFORM = {
    "DelaySeconds": "delay_seconds",
    "MaximumMessageSize": "max_message_size",
    "MessageRetentionPeriod": "message_retention_seconds",
    "VisibilityTimeout": "visibility_timeout_seconds",
}


def aws_sqs(action: str, queue: QueueFacts) -> str:
    """The beginning of a line for the command line, which goes by its own Region, not the URL's."""
    return f"aws sqs {action}" + (f" --region {queue.region}" if queue.region else "")


def resource_name(queue: QueueFacts) -> str:
    """A name that Terraform allows for the queue's resource: it begins with no digit."""
    name = "".join(c if c.isalnum() else "_" for c in queue.url.rpartition("/")[2])
    return f"_{name}" if name[:1].isdigit() else name


def terraform(queue: QueueFacts, *arguments: str) -> str:
    """The queue's resource with some of its arguments."""
    lines = "\n".join(f"  {argument}" for argument in arguments)
    return f'resource "aws_sqs_queue" "{resource_name(queue)}" {{\n  # ...\n{lines}\n}}'


def set_attributes(queue: QueueFacts, attributes: Mapping[str, str], *arguments: str) -> Fix:
    """Set attributes of a queue.

    Arguments:
        queue: the queue.
        attributes: as SetQueueAttributes takes them.
        arguments: Terraform's, where they are not plain numbers.
    """
    plain = [
        f"{_TERRAFORM[name]} = {value}" for name, value in attributes.items() if name in _TERRAFORM
    ]
    return Fix(
        aws=(
            f"{aws_sqs('set-queue-attributes', queue)} --queue-url {queue.url}"
            f" --attributes '{json.dumps(dict(attributes))}'"
        ),
        terraform=terraform(queue, *plain, *arguments),
    )


def without_redrive_policy(queue: QueueFacts) -> Fix:
    """Remove a queue's redrive policy.

    Terraform leaves it as it is where the configuration has ``null``: the argument is a computed
    one.
    """
    return set_attributes(queue, {"RedrivePolicy": ""}, 'redrive_policy = ""')
