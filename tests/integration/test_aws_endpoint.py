"""The way to the real SQS, tried on a moto that checks signatures and rights as AWS does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.aws import announcement, aws
from tests.support.fault_proxy import fault_proxy
from tests.support.queue_names import QUEUE_NAME_PREFIX, queue_name
from tests.support.servers import before_the_first_call, moto, sqs_client
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

REGION = "eu-west-1"
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@pytest.fixture(scope="module")
def keys() -> Iterator[dict[str, dict[str, str]]]:
    """Environments that lead to a server: one may do all with SQS, one may not delete queues."""
    with moto() as endpoint:
        root = boto3.Session("root", "root", region_name=REGION)
        iam = root.client("iam", endpoint_url=endpoint)
        found = {}
        for user, denied in {"owner": "s3:*", "clerk": "sqs:DeleteQueue"}.items():
            statements = [
                {"Effect": "Allow", "Action": "sqs:*", "Resource": "*"},
                {"Effect": "Deny", "Action": denied, "Resource": "*"},
            ]
            policy = {"Version": "2012-10-17", "Statement": statements}
            iam.create_user(UserName=user)
            iam.put_user_policy(UserName=user, PolicyName="sqs", PolicyDocument=json.dumps(policy))
            key = iam.create_access_key(UserName=user)["AccessKey"]
            values = (key["AccessKeyId"], key["SecretAccessKey"], REGION)
            found[user] = {
                **dict(zip(VARIABLES, values, strict=True)),
                "AWS_ENDPOINT_URL_SQS": endpoint,
                "SQS_SERVER": "aws",
            }
        check_from_now_on = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(check_from_now_on, timeout=10).close()
        yield found


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("AWS_") and not name.endswith("CA_BUNDLE"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("SQS_ENDPOINT", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)


def become(user: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> SQSClient:
    """Who runs the tests; the client is theirs, and goes to the server without a proxy."""
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    return boto3.Session().client("sqs")


def names(sqs: SQSClient) -> list[str]:
    return [url.rpartition("/")[2] for url in sqs.list_queues().get("QueueUrls", [])]


def refusal(endpoint: str) -> str:
    with pytest.raises(ClientError) as caught:
        sqs_client(endpoint, retries={"total_max_attempts": 1}).list_queues()
    return str(caught.value)


def test_a_server_that_checks_signatures_takes_what_the_proxy_has_signed(
    keys: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    become(keys["owner"], monkeypatch)
    server = keys["owner"]["AWS_ENDPOINT_URL_SQS"]
    assert "InvalidClientTokenId" in refusal(server), "the tests' own credentials"
    with fault_proxy(server) as proxy:
        assert "InvalidClientTokenId" in refusal(proxy.endpoint)

    with aws() as endpoint:
        client = sqs_client(endpoint)
        url = client.create_queue(QueueName=queue_name())["QueueUrl"]
        sent = client.send_message(QueueUrl=url, MessageBody="Grüße")
        [message] = client.receive_message(QueueUrl=url)["Messages"]
        assert (message["MessageId"], message["Body"]) == (sent["MessageId"], "Grüße")
        assert f":{REGION}:" in sqs_arn(client, url)

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with fault_proxy(server, sign=True) as proxy:
        assert "SignatureDoesNotMatch" in refusal(proxy.endpoint)


def sqs_arn(sqs: SQSClient, url: str) -> str:
    answer = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return answer["Attributes"]["QueueArn"]


def test_at_the_end_the_queues_of_the_run_are_deleted_and_no_others(
    keys: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sqs = become(keys["owner"], monkeypatch)
    other = sqs.create_queue(QueueName="of-somebody-else")["QueueUrl"]
    with aws() as endpoint:
        client = sqs_client(endpoint)
        client.create_queue(QueueName=queue_name("left-by-a-test"))
        url = client.create_queue(QueueName=queue_name("deleted-by-its-test"))["QueueUrl"]
        client.delete_queue(QueueUrl=url)
        assert len(names(sqs)) == 2
    assert names(sqs) == ["of-somebody-else"]
    assert "3 calls to SQS" in capsys.readouterr().err
    sqs.delete_queue(QueueUrl=other)


def test_a_queue_that_cannot_be_deleted_is_named(
    keys: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sqs = become(keys["clerk"], monkeypatch)
    name = queue_name("left")
    said = rf"may be left, {QUEUE_NAME_PREFIX}.*/{name}"
    with pytest.raises(RuntimeError, match=said), aws(deletion_seconds=0):
        sqs.create_queue(QueueName=name)
    become(keys["owner"], monkeypatch).delete_queue(
        QueueUrl=sqs.get_queue_url(QueueName=name)["QueueUrl"]
    )


@pytest.mark.parametrize(
    ("env", "said"),
    [
        pytest.param({"AWS_DEFAULT_REGION": REGION}, "needs credentials", id="no credentials"),
        pytest.param(dict(zip(VARIABLES[:2], "ab", strict=True)), "a region", id="no region"),
        pytest.param({"AWS_PROFILE": "nobody"}, r"profile \(nobody\)", id="no such profile"),
        pytest.param(
            dict(zip(VARIABLES, ("testing", "testing", REGION), strict=True)),
            "'testing', which is for local servers",
            id="dummy credentials",
        ),
    ],
)
def test_without_an_account_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=said):
        announcement()
    with pytest.raises(RuntimeError, match=said), aws():
        pass


def test_a_local_server_needs_no_word_and_an_unknown_one_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SQS_SERVER", raising=False)
    assert before_the_first_call() == ""
    monkeypatch.setenv("SQS_SERVER", "elasticmq")
    with pytest.raises(RuntimeError, match="'elasticmq': it must be one of ministack, moto"):
        before_the_first_call()
    monkeypatch.setenv("SQS_ENDPOINT", "http://127.0.0.1:9324")
    assert before_the_first_call() == ""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=110
    )


def test_a_run_says_what_it_costs_before_the_first_test_and_leaves_no_queue(
    keys: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("-m", "server", "tests/integration/test_fault_proxy.py", **keys["owner"])
    assert done.returncode == 0, done.stdout
    cost, dots = done.stdout.index(f"in {REGION}. All of them"), done.stdout.index("test_fault_pr")
    assert cost < dots
    assert "calls to SQS" in done.stderr
    for value in list(keys["owner"].values())[:2]:
        assert value not in done.stdout + done.stderr
    assert names(become(keys["owner"], monkeypatch)) == []


def test_a_run_without_an_account_ends_before_the_first_test() -> None:
    refused = run("-m", "server", "tests/integration/test_fault_proxy.py", SQS_SERVER="aws")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert refused.stderr.count("needs credentials and a region") == 1
    assert "passed" not in refused.stdout

    others = run("-q", "tests/integration/test_fault_proxy.py", "-k", "seed", SQS_SERVER="aws")
    assert others.returncode == 0, "a test that speaks to no SQS needs no account"
