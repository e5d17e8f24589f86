"""The fault proxy of the tests counts exactly, and each of its faults does what its name says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
)

from tests.support.cases import cases
from tests.support.fault_proxy import (
    Count,
    drop_after,
    drop_before,
    expired_token,
    failed_entries,
    throttled,
    unavailable,
)
from tests.support.processes import eventually

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue


def send(sqs: SQSClient, queue: LocalQueue, count: int = 1) -> None:
    entries: list[Any] = [{"Id": str(i), "MessageBody": f"body {i}"} for i in range(count)]
    sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)


def receive(sqs: SQSClient, queue: LocalQueue) -> list[Any]:
    answer = sqs.receive_message(QueueUrl=queue.url, MaxNumberOfMessages=10)
    return list(answer.get("Messages", []))


def delete(sqs: SQSClient, queue: LocalQueue, messages: list[Any]) -> Any:
    return sqs.delete_message_batch(
        QueueUrl=queue.url,
        Entries=[
            {"Id": f"m{i}", "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(messages)
        ],
    )


def size(sqs: SQSClient, queue: LocalQueue) -> int:
    answer = sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])
    return sum(
        int(answer["Attributes"][name])
        for name in ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    )


def test_counts(proxy, proxied_sqs, queue):
    """The proxy counts calls, entries and messages per action."""
    send(proxied_sqs, queue, 3)
    send(proxied_sqs, queue, 2)
    delete(proxied_sqs, queue, receive(proxied_sqs, queue))

    assert proxy.counts() == {
        "SendMessageBatch": Count(calls=2, entries=5),
        "ReceiveMessage": Count(calls=1, messages=5),
        "DeleteMessageBatch": Count(calls=1, entries=5),
    }
    assert proxy.counts()["PurgeQueue"] == Count()


@cases(
    "fault status code",
    {
        "unavailable": (unavailable(), 503, "ServiceUnavailable"),
        "throttled": (throttled(), 400, "ThrottlingException"),
        "expired-token": (expired_token(), 403, "ExpiredToken"),
    },
)
def test_injected_error(proxy, proxied_sqs, sqs, queue, fault, status, code):
    """boto3 raises the same error for an injected fault as for an error of SQS."""
    proxy.inject(fault)
    with pytest.raises(ClientError) as caught:
        send(proxied_sqs, queue)

    assert caught.value.response["Error"]["Code"] == code
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert size(sqs, queue) == 0
    assert proxy.counts()["SendMessageBatch"] == Count(calls=1, entries=1, faults=1)


@pytest.mark.parametrize(("fault", "carried_out"), [(drop_before, 0), (drop_after, 1)])
def test_lost_answer(proxy, proxied_sqs, sqs, queue, fault, carried_out):
    """The proxy drops a request before SQS gets it, or the response after SQS has acted."""
    proxy.inject(fault(actions=("SendMessageBatch",), times=1))
    with pytest.raises(ConnectionClosedError):
        send(proxied_sqs, queue)
    assert size(sqs, queue) == carried_out
    assert len(receive(proxied_sqs, queue)) == carried_out


def test_failed_entries(proxy, proxied_sqs, sqs, queue):
    """The proxy does not forward the entries that must fail, and reports them as failed."""
    send(sqs, queue, 4)
    messages = receive(sqs, queue)
    proxy.inject(failed_entries(0, 2, actions=("DeleteMessageBatch",), times=1))
    answer = delete(proxied_sqs, queue, messages)

    assert [entry["Id"] for entry in answer["Successful"]] == ["m1", "m3"]
    assert [(e["Id"], e["Code"], e["SenderFault"]) for e in answer["Failed"]] == [
        ("m0", "InternalError", False),
        ("m2", "InternalError", False),
    ]
    assert size(sqs, queue) == 2
    assert proxy.counts()["DeleteMessageBatch"] == Count(calls=1, entries=4, faults=1)


def test_unreachable(proxy, proxied_sqs, queue):
    """An unreachable proxy refuses connections and recovers by itself."""
    send(proxied_sqs, queue)  # opens a connection, which the proxy can cut
    proxy.unreachable(1)
    with pytest.raises((EndpointConnectionError, ConnectionClosedError)):
        send(proxied_sqs, queue)
    with pytest.raises(EndpointConnectionError):
        send(proxied_sqs, queue)

    def is_back():
        try:
            send(proxied_sqs, queue)
        except EndpointConnectionError:
            return False
        return True

    eventually(is_back, timeout=5)
