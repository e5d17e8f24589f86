"""The way to the real SQS, tried on a local server that takes any signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from tests.support.aws import aws
from tests.support.servers import sqs_client
from tests.support.signing import Signer

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

REGION = "eu-west-1"


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


def test_what_a_test_has_left_is_deleted_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sqs: SQSClient,
    sqs_endpoint: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs_endpoint)
    with aws() as endpoint:
        client = sqs_client(endpoint)
        left = client.create_queue(QueueName="left-by-a-test")["QueueUrl"]
        deleted = client.create_queue(QueueName="deleted-by-its-test")["QueueUrl"]
        client.delete_queue(QueueUrl=deleted)
    for name in ("left-by-a-test", "deleted-by-its-test"):
        with pytest.raises(ClientError, match=r"NonExistentQueue|QueueDoesNotExist"):
            sqs.get_queue_url(QueueName=name)
    said = capsys.readouterr().err
    assert "3 calls to SQS" in said
    assert left in said
    assert deleted not in said


def test_what_goes_to_aws_is_signed_for_aws_with_the_credentials_of_the_account() -> None:
    before = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/sqs/aws4_request",
        "Host": "127.0.0.1:1234",
        "X-Amz-Date": "20260101T000000Z",
        "X-Amz-Target": "AmazonSQS.ListQueues",
    }
    after = Signer().sign("POST", f"https://sqs.{REGION}.amazonaws.com/", before, b"{}")
    assert "Credential=AKIDEXAMPLE/" in after["Authorization"]
    assert f"/{REGION}/sqs/aws4_request" in after["Authorization"]
    assert "x-amz-target" in after["Authorization"], "SignedHeaders"
    assert after["X-Amz-Target"] == "AmazonSQS.ListQueues"
    assert after["X-Amz-Date"] != before["X-Amz-Date"]
    assert "127.0.0.1" not in str(after)


def test_without_credentials_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(RuntimeError, match="credentials and a region"), aws():
        pass
