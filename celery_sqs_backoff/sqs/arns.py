"""Parses the ARN of a queue strictly.

Callers compare whole ARNs, because another account or Region may have a queue of the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_NAME = r"(?=.{1,80}\Z)[A-Za-z0-9_-]+(?:\.fifo)?"

#: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsqs.html
_ARN = re.compile(rf"arn:(aws[a-z-]*):sqs:([a-z0-9-]+):([0-9]{{1,12}}):({_NAME})")

_REGION = r"[a-z]{2,4}(?:-[a-z]+)+-\d+"

#: Matches the Region in ``sqs.eu-west-1.amazonaws.com`` and in the legacy form
#: ``eu-west-1.queue.amazonaws.com``. In other places of a host, text such as ``eu-west-1`` may mean
#: something else.
_REGION_IN_HOST = re.compile(rf"(?:^|\.)sqs(?:-fips)?\.({_REGION})\.|^({_REGION})\.queue\.")


@dataclass(frozen=True, slots=True)
class QueueArn:
    """The parts of a queue's ARN."""

    partition: str
    region: str
    account: str
    name: str

    @classmethod
    def parse(cls, text: object) -> QueueArn:
        """Read an ARN.

        Raises:
            ValueError: ``text`` is not the ARN of a queue.
        """
        found = _ARN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError("expected the ARN of a queue: arn:aws:sqs:REGION:ACCOUNT:NAME")
        return cls(*found.groups())

    def sibling(self, name: str) -> QueueArn:
        """Return the ARN of the queue ``name`` in the account and Region of this queue."""
        return replace(self, name=name)

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    def __str__(self) -> str:
        return f"arn:{self.partition}:sqs:{self.region}:{self.account}:{self.name}"


def region_of(host: str) -> str | None:
    """Return the Region in the host of a queue's URL.

    Return ``None`` if the host has another form, such as a local server's. This page lists all
    hosts, including the legacy hosts:
    https://docs.aws.amazon.com/general/latest/gr/sqs-service.html
    """
    if host == "queue.amazonaws.com":
        return "us-east-1"
    found = _REGION_IN_HOST.search(host)
    return found and (found[1] or found[2])


def is_queue_name(text: str) -> bool:
    """Return whether SQS would accept ``text`` as the name of a queue.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_CreateQueue.html
    """
    return re.fullmatch(_NAME, text) is not None
