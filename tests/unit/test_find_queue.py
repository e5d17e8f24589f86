"""Why a queue cannot be found is a code that says where to look."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.sqs.find_queue import find_queue


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (
            ClientError({"Error": {"Code": "AccessDenied"}}, "AssumeRole"),
            "AccessDenied (AssumeRole)",
        ),
        (NoCredentialsError(), "NoCredentialsError"),
    ],
    ids=["role", "no credentials"],
)
def test_a_client_that_cannot_be_made_is_a_code_and_an_action(raised: Exception, code: str) -> None:
    """kombu assumes ``sts_role_arn`` while it makes the client of a predefined queue."""

    def sqs(queue: str) -> object:
        raise raised

    channel = SimpleNamespace(
        _resolve_queue_url=lambda name: f"https://sqs/1/{name}",
        predefined_queues={"mails": {"url": "https://sqs/1/mails"}},
        _predefined_queue_clients={},
        transport_options={"sts_role_arn": "role"},
        sqs=sqs,
    )
    assert find_queue(channel, "mails") == Failure(Kind.LOCAL, code)
