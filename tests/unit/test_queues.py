"""What a queue says of itself, and what is assumed where it may not be asked."""

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


def test_a_queues_attributes_are_read():
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
def test_a_queue_without_a_redrive_policy_has_no_dead_letter_queue(redrive):
    queue = read_queue(FakeClient(redrive), URL)
    assert queue.dlq_url is None
    assert queue.max_receive_count is None


def test_a_queue_that_may_not_be_read_is_logged_and_taken_for_a_plain_one(caplog):
    assert read_queue(FakeClient(denied()), URL) == Queue(URL)
    assert "sqs:GetQueueAttributes" in caplog.text


@pytest.mark.parametrize(
    "answer", [denied("ExpiredToken"), EndpointConnectionError(endpoint_url="x")]
)
def test_a_queue_that_cannot_be_read_now_is_not_taken_for_one_without_dead_letters(answer):
    assert not read_queue(FakeClient(answer), URL).is_read


def test_a_queue_that_cannot_be_read_any_more_keeps_what_was_read(caplog):
    last = Queue(URL, visibility_timeout_seconds=77, dlq_arn=DLQ_ARN)
    for answer in (denied(), denied("ExpiredToken")):
        assert read_queue(FakeClient(answer), URL, last=last) == last
    assert caplog.text == ""


def test_a_visibility_timeout_of_zero_is_replaced_at_each_receive():
    """Each message would be back before its worker has seen it."""
    queue = read_queue(FakeClient({"VisibilityTimeout": "0"}), URL)
    assert queue.visibility_timeout_seconds == 30


def test_a_queue_is_not_its_own_dead_letter_queue():
    """What it would give up would come back at once."""
    arn = "arn:aws:sqs:us-east-1:123456789012:mail"
    redrive = {"deadLetterTargetArn": arn, "maxReceiveCount": "5"}
    answer = {"QueueArn": arn, "RedrivePolicy": json.dumps(redrive)}
    queue = read_queue(FakeClient(answer), URL)
    assert queue.dlq_url is None
    assert queue.max_receive_count == 5
