"""Why a queue cannot be found is a code that says where to look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from kombu import Connection
from kombu.transport.SQS import Channel

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
        canonical_queue_name=lambda name: name,
        _resolve_queue_url=lambda name: f"https://sqs/1/{name}",
        predefined_queues={"mails": {"url": "https://sqs/1/mails"}},
        _predefined_queue_clients={},
        transport_options={"sts_role_arn": "role"},
        sqs=sqs,
    )
    assert find_queue(channel, "mails") == Failure(Kind.LOCAL, code)


def test_a_predefined_queue_with_a_prefix_or_a_dot_is_asked_with_its_own_client() -> None:
    """Else it is looked for in another Region, or with other credentials, than workers use."""
    asked: list[str] = []
    channel = SimpleNamespace(
        canonical_queue_name=lambda name: f"prod-{name}".replace(".", "-"),
        _resolve_queue_url=lambda name: "https://sqs/1/prod-mails-eu",
        predefined_queues={"prod-mails-eu": {"url": "https://sqs/1/prod-mails-eu"}},
        _predefined_queue_clients={},
        transport_options={},
        sqs=lambda queue=None: asked.append(queue),
    )
    found = find_queue(channel, "mails.eu")
    assert not isinstance(found, Failure)
    assert asked == ["prod-mails-eu"]


def test_a_predefined_queue_with_a_role_of_its_own_is_asked_as_workers_ask_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kombu knows no such role: the doctor would report what another identity may do."""
    assumed: list[str] = []

    def token(channel: object, role: str, seconds: int) -> dict[str, str]:
        assumed.append(role)
        return {"AccessKeyId": f"key of {role}", "SecretAccessKey": "s", "SessionToken": "t"}

    monkeypatch.setattr(Channel, "generate_sts_session_token", token)
    queues = {"a": {"sts_role_arn": "ra"}, "a2": {"sts_role_arn": "ra"}, "b": {}, "c": {}}
    options = {
        "region": "us-east-1",
        "predefined_queues": {
            name: {"url": f"http://127.0.0.1:9/0/{name}", **queue} for name, queue in queues.items()
        },
    }
    channel = Connection("sqs://key:secret@127.0.0.1:9//", transport_options=options).channel()
    keys = []
    for name in ("c", "a", "a2", "b"):
        found = find_queue(channel, name)
        assert not isinstance(found, Failure)
        client: Any = found[1](found[0])._client()
        keys.append(client._request_signer._credentials.access_key)
    assert keys == ["key", "key of ra", "key of ra", "key"]
    assert assumed == ["ra"]
