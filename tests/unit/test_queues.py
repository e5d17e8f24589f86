"""What a queue says of itself, and what is assumed where it may not be asked."""

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from celery_sqs_backoff.queues import Queue, error_code, read_queue, settling_client

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


@pytest.mark.parametrize("redrive", [{}, {"RedrivePolicy": ""}])
def test_a_queue_without_a_redrive_policy_has_no_dead_letter_queue(redrive):
    queue = read_queue(FakeClient({"VisibilityTimeout": "0", **redrive}), URL)
    assert queue.dlq_url is None
    assert queue.max_receive_count is None
    assert queue.visibility_timeout_seconds == 0  # a legal zero


@pytest.mark.parametrize(
    "answer",
    [denied(), {"VisibilityTimeout": "?"}],
    ids=["denied", "nonsense"],
)
def test_a_queue_that_may_not_be_read_is_logged_and_taken_for_a_plain_one(answer, caplog):
    assert read_queue(FakeClient(answer), URL) == Queue(URL)
    assert "sqs:GetQueueAttributes" in caplog.text


@pytest.mark.parametrize(
    "answer", [denied("ExpiredToken"), EndpointConnectionError(endpoint_url="x")]
)
def test_a_queue_that_cannot_be_read_now_is_not_taken_for_one_without_dead_letters(answer):
    assert not read_queue(FakeClient(answer), URL).is_read


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (denied(), "AccessDenied"),
        (denied("ExpiredToken"), "ExpiredToken"),
        (ClientError({}, "x"), "Unknown"),
        (EndpointConnectionError(endpoint_url="x"), "EndpointConnectionError"),
    ],
)
def test_errors_have_short_names(error, code):
    assert error_code(error) == code


@pytest.mark.hazard("H18")
def test_the_settling_client_is_the_same_account_with_short_timeouts():
    session = boto3.Session(
        aws_access_key_id="a", aws_secret_access_key="b", region_name="eu-north-1"
    )
    client = session.client("sqs", endpoint_url="http://127.0.0.1:9")
    copy = settling_client(client)
    assert copy.meta.region_name == "eu-north-1"
    assert copy.meta.endpoint_url == "http://127.0.0.1:9"
    assert copy._request_signer._credentials is client._request_signer._credentials
    assert copy.meta.config.read_timeout <= 10
    assert copy.meta.config.retries["total_max_attempts"] == 1
