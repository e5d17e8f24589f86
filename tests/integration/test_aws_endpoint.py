"""How the tests call the real SQS. Here moto stands for AWS, and checks signatures and rights."""

from __future__ import annotations

import json
import os
import urllib.request

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.aws import announcement, aws
from tests.support.cases import cases
from tests.support.fault_proxy import fault_proxy
from tests.support.queue_names import queue_name
from tests.support.servers import moto, sqs_client

REGION = "eu-west-1"
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@pytest.fixture
def owner():
    """Start the server, and yield the environment of a user who has all rights on SQS."""
    with moto() as endpoint:
        root = boto3.Session("root", "root", region_name=REGION)
        iam = root.client("iam", endpoint_url=endpoint)
        statement = {"Effect": "Allow", "Action": "sqs:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.create_user(UserName="owner")
        iam.put_user_policy(UserName="owner", PolicyName="sqs", PolicyDocument=policy)
        key = iam.create_access_key(UserName="owner")["AccessKey"]
        check_from_now_on = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(check_from_now_on, timeout=10).close()
        values = (key["AccessKeyId"], key["SecretAccessKey"], REGION)
        yield dict(zip(VARIABLES, values, strict=True)) | {"AWS_ENDPOINT_URL_SQS": endpoint}


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in os.environ:
        if name.startswith("AWS_") and not name.endswith("CA_BUNDLE"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("SQS_ENDPOINT", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)


def refusal(endpoint: str) -> str:
    with pytest.raises(ClientError) as caught:
        sqs_client(endpoint, retries={"total_max_attempts": 1}).list_queues()
    return str(caught.value)


def test_sign_and_clean_up(owner, monkeypatch, capsys):
    """The proxy signs with the account's keys and deletes only the queues of its own run."""
    for name, value in owner.items():
        monkeypatch.setenv(name, value)
    server = owner["AWS_ENDPOINT_URL_SQS"]
    assert "InvalidClientTokenId" in refusal(server), "the server accepts dummy credentials"
    sqs = boto3.Session().client("sqs")
    other = sqs.create_queue(QueueName="of-somebody-else")["QueueUrl"]
    with aws() as endpoint:
        client = sqs_client(endpoint)
        url = client.create_queue(QueueName=queue_name())["QueueUrl"]
        sent = client.send_message(QueueUrl=url, MessageBody="Grüße")
        [message] = client.receive_message(QueueUrl=url)["Messages"]
        assert (message["MessageId"], message["Body"]) == (sent["MessageId"], "Grüße")
    assert sqs.list_queues()["QueueUrls"] == [other]
    assert "3 calls to SQS" in capsys.readouterr().err

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with fault_proxy(server, sign=True) as proxy:
        assert "SignatureDoesNotMatch" in refusal(proxy.endpoint)


@cases(
    "env said",
    {
        "no credentials": ({"AWS_DEFAULT_REGION": REGION}, "needs credentials"),
        "no region": (dict(zip(VARIABLES[:2], "ab", strict=True)), "a region"),
        "no such profile": ({"AWS_PROFILE": "nobody"}, r"profile \(nobody\)"),
        "dummy credentials": (
            dict(zip(VARIABLES, ("testing", "testing", REGION), strict=True)),
            "'testing', which is for local servers",
        ),
    },
)
def test_no_account(monkeypatch, env, said):
    """Without an account or a region, the tests end with an error before the first call."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=said):
        announcement()
    with pytest.raises(RuntimeError, match=said), aws():
        pass
