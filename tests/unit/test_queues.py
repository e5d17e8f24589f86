"""Reading the attributes of a queue, and what a worker assumes if it cannot read them."""

import json

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from celery_sqs_backoff.sqs.queues import Queue, read_queue

URL = "https://sqs.us-east-1.amazonaws.com/123456789012/mail"
DLQ_ARN = "arn:aws:sqs:us-east-1:123456789012:mail-dlq"


class FakeClient:
    def __init__(self, answer):
        self.answer = answer

    def get_queue_attributes(self, QueueUrl, AttributeNames):  # noqa: N803
        assert (QueueUrl, AttributeNames) == (URL, ["All"])
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"Attributes": self.answer}


def denied(code="AWS.SimpleQueueService.AccessDenied"):
    return ClientError({"Error": {"Code": code}}, "GetQueueAttributes")


def test_attributes():
    """The worker reads a queue's attributes from the answer of SQS."""
    queue = read_queue(
        FakeClient(
            {
                "VisibilityTimeout": "77",
                "MessageRetentionPeriod": "345600",
                "QueueArn": "arn:aws:sqs:us-east-1:123456789012:mail",
                "RedrivePolicy": f'{{"deadLetterTargetArn":"{DLQ_ARN}","maxReceiveCount":"5"}}',
            }
        ),
        URL,
        now=0,
    )
    assert queue == Queue(
        URL,
        visibility_timeout_seconds=77,
        retention_seconds=345_600,
        max_receive_count=5,
        arn="arn:aws:sqs:us-east-1:123456789012:mail",
        dlq_arn=DLQ_ARN,
    )
    assert queue.dlq_url == f"{URL}-dlq"
    assert queue.name == "mail"


@pytest.mark.parametrize(
    "redrive", [{}, {"RedrivePolicy": ""}, {"RedrivePolicy": "?"}, {"RedrivePolicy": "[]"}]
)
def test_no_redrive_policy(redrive):
    """A queue without a valid redrive policy has no dead-letter queue."""
    queue = read_queue(FakeClient(redrive), URL, now=0)
    assert queue.dlq_url is None
    assert queue.max_receive_count is None


def test_read_denied(caplog):
    """If the worker may not read a queue for a minute, it logs this and assumes defaults."""
    first = read_queue(FakeClient(denied()), URL, now=100)
    second = read_queue(FakeClient(denied()), URL, now=159, last=first)
    assert [first.is_read, second.is_read] == [False, False]
    assert "sqs:GetQueueAttributes" not in caplog.text
    assert read_queue(FakeClient(denied()), URL, now=160, last=second) == Queue(URL)
    assert "sqs:GetQueueAttributes" in caplog.text


@pytest.mark.parametrize(
    "answer", [denied("ExpiredToken"), EndpointConnectionError(endpoint_url="x")]
)
def test_read_fails(answer):
    """If a read fails for a passing reason, the worker does not assume defaults."""
    assert not read_queue(FakeClient(answer), URL, now=0).is_read


def test_read_fails_later(caplog):
    """If a queue can no longer be read, the worker keeps the attributes that it read last."""
    last = Queue(URL, visibility_timeout_seconds=77, dlq_arn=DLQ_ARN)
    for answer in (denied(), denied("ExpiredToken")):
        assert read_queue(FakeClient(answer), URL, now=0, last=last) == last
    assert caplog.text == ""


def test_zero_visibility_timeout():
    """If a queue's visibility timeout is 0, the worker uses 30 seconds instead.

    With 0, SQS would deliver each message again as soon as a worker has received it.
    """
    queue = read_queue(FakeClient({"VisibilityTimeout": "0"}), URL, now=0)
    assert queue.visibility_timeout_seconds == 30


def test_own_dead_letter_queue():
    """If a queue is set to be its own dead-letter queue, the worker uses no dead-letter queue.

    Otherwise a message that the worker gives up would come back at once.
    """
    arn = "arn:aws:sqs:us-east-1:123456789012:mail"
    redrive = {"deadLetterTargetArn": arn, "maxReceiveCount": "5"}
    answer = {"QueueArn": arn, "RedrivePolicy": json.dumps(redrive)}
    queue = read_queue(FakeClient(answer), URL, now=0)
    assert queue.dlq_url is None
    assert queue.max_receive_count == 5
