"""The proxy counts exactly, and each fault does what its name says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
)

from tests.support.fault_proxy import (
    Count,
    Fault,
    FaultProxy,
    Rule,
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


def test_calls_entries_and_messages_are_counted_per_action(
    proxy: FaultProxy, proxied_sqs: SQSClient, queue: LocalQueue
) -> None:
    send(proxied_sqs, queue, 3)
    send(proxied_sqs, queue, 2)
    delete(proxied_sqs, queue, receive(proxied_sqs, queue))

    assert proxy.counts() == {
        "SendMessageBatch": Count(calls=2, entries=5),
        "ReceiveMessage": Count(calls=1, messages=5),
        "DeleteMessageBatch": Count(calls=1, entries=5),
    }
    assert proxy.counts()["PurgeQueue"] == Count()


def test_a_queue_url_with_another_host_does_not_lead_a_client_past_the_proxy(
    proxy: FaultProxy, proxied_sqs: SQSClient, queue: LocalQueue
) -> None:
    """``queue`` was made without the proxy, so its URL names the server's own port."""
    assert proxy.endpoint not in queue.url
    send(proxied_sqs, queue)
    assert proxy.counts()["SendMessageBatch"].calls == 1


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        pytest.param(unavailable(), 503, "ServiceUnavailable", id="unavailable"),
        pytest.param(throttled(), 400, "ThrottlingException", id="throttled"),
        pytest.param(expired_token(), 403, "ExpiredToken", id="expired-token"),
    ],
)
def test_an_injected_error_reaches_boto3_as_sqs_would_send_it(
    proxy: FaultProxy,
    proxied_sqs: SQSClient,
    sqs: SQSClient,
    queue: LocalQueue,
    fault: Fault,
    status: int,
    code: str,
) -> None:
    proxy.inject(fault)
    with pytest.raises(ClientError) as caught:
        send(proxied_sqs, queue)

    assert caught.value.response["Error"]["Code"] == code
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert size(sqs, queue) == 0
    assert proxy.counts()["SendMessageBatch"] == Count(calls=1, entries=1, faults=1)


def test_a_fault_is_for_its_actions_and_for_so_many_calls(
    proxy: FaultProxy, proxied_sqs: SQSClient, queue: LocalQueue
) -> None:
    proxy.inject(unavailable(actions=("ReceiveMessage",), times=2))
    send(proxied_sqs, queue)
    for _ in range(2):
        with pytest.raises(ClientError):
            receive(proxied_sqs, queue)
    assert len(receive(proxied_sqs, queue)) == 1


def test_a_request_dropped_before_is_not_seen_by_sqs(
    proxy: FaultProxy, proxied_sqs: SQSClient, sqs: SQSClient, queue: LocalQueue
) -> None:
    proxy.inject(drop_before(times=1))
    with pytest.raises(ConnectionClosedError):
        send(proxied_sqs, queue)
    assert size(sqs, queue) == 0


def test_a_request_dropped_after_was_carried_out_and_its_answer_is_lost(
    proxy: FaultProxy, proxied_sqs: SQSClient, sqs: SQSClient, queue: LocalQueue
) -> None:
    proxy.inject(drop_after(times=1))
    with pytest.raises(ConnectionClosedError):
        send(proxied_sqs, queue)
    assert size(sqs, queue) == 1


def test_failed_entries_are_answered_and_not_forwarded(
    proxy: FaultProxy, proxied_sqs: SQSClient, sqs: SQSClient, queue: LocalQueue
) -> None:
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


def test_an_unreachable_server_refuses_connections_and_comes_back_by_itself(
    proxy: FaultProxy, proxied_sqs: SQSClient, queue: LocalQueue
) -> None:
    send(proxied_sqs, queue)  # so that there is a connection to cut
    proxy.unreachable(1)
    with pytest.raises((EndpointConnectionError, ConnectionClosedError)):
        send(proxied_sqs, queue)
    with pytest.raises(EndpointConnectionError):
        send(proxied_sqs, queue)

    def is_back() -> bool:
        try:
            send(proxied_sqs, queue)
        except EndpointConnectionError:
            return False
        return True

    eventually(is_back, timeout=5)


def test_a_probable_fault_falls_the_same_way_for_the_same_seed() -> None:
    def falls(seed: int) -> list[bool]:
        rule = Rule(unavailable(probability=0.5, seed=seed))
        return [rule.spoils("SendMessage", []) is not None for _ in range(40)]

    assert falls(1) == falls(1)
    assert falls(1) != falls(2)
    assert 5 < sum(falls(1)) < 35
