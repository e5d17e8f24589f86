"""Commands find a queue by its name and call it with its role, in the same way as workers."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from kombu import Connection
from kombu.transport.SQS import Channel

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure
from celery_sqs_backoff.sqs.find_queue import NOT_PREDEFINED, QueueFinder

BASE = "http://127.0.0.1:9/0"


def finder(queues: dict[str, dict[str, Any]], **options: Any) -> QueueFinder:
    predefined = {name: {"url": f"{BASE}/{name}", **queue} for name, queue in queues.items()}
    options = {"region": "us-east-1", "predefined_queues": predefined, **options}
    return QueueFinder(
        Connection("sqs://key:secret@127.0.0.1:9//", transport_options=options).channel()
    )


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (
            ClientError({"Error": {"Code": "AccessDenied"}}, "AssumeRole"),
            "CredentialsNotRenewed (AccessDenied)",
        ),
        (NoCredentialsError(), "NoCredentialsError"),
    ],
    ids=["role", "no credentials"],
)
def test_role_not_assumed(raised, code, monkeypatch):
    """If the queue's role cannot be assumed, calls fail with a code that names the error."""

    def token(role, seconds):
        raise raised

    monkeypatch.setattr(Channel, "generate_sts_session_token", staticmethod(token))
    found = finder({"mails": {"sts_role_arn": "r"}}).find("mails")
    assert isinstance(found, Calls)
    failure = found.attributes()
    assert isinstance(failure, Failure)
    assert failure.code == code


def test_queue_name_of_kombu():
    """A queue is found by the name that kombu makes of it: with the prefix, and without dots."""
    found = finder({"prod-mails-eu": {"url": f"{BASE}/x"}}, queue_name_prefix="prod-")
    calls = found.find("mails.eu")
    assert isinstance(calls, Calls)
    assert calls.queue_url == f"{BASE}/x"
    missing = found.find("prod-mails-eu")
    assert isinstance(missing, Failure)
    assert missing.code == NOT_PREDEFINED
