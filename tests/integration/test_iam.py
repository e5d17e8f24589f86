"""The policies in docs/queues.md allow the calls that we make on each queue, and no more."""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from kombu.transport import SQS

from celery_sqs_backoff.redrive import peek
from celery_sqs_backoff.sqs.arns import QueueArn
from celery_sqs_backoff.store.dynamodb import DynamoDBStore
from tests.unit.test_docs import OPERATIONS, ROOT, blocks, code_spans, iam_action, tables

from .redrive_stage import RedriveStage

#: The page of each policy, and its number on the page.
WORKER, LOOK, WRITERS, SOURCES, ROLE, KEYS = (("queues.md", number) for number in range(6))
STORE = ("stores.md", 0)
MAIN, DLQ = "mail", "mail-dlq"
WORKERS_ROLE = "arn:aws:iam::123456789012:role/mail-worker"
SOMEBODY = "arn:aws:iam::123456789012:role/web"

#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-key-management.html
OF_KMS = {
    "sqs:ReceiveMessage": {"kms:Decrypt"},
    "sqs:SendMessage": {"kms:GenerateDataKey", "kms:Decrypt"},
}


def shown(policy: tuple[str, int]) -> Any:
    page, number = policy
    return json.loads(blocks(ROOT / "docs" / page, "json")[number].code)


def granted(policy: tuple[str, int], name: str) -> set[str]:
    """Return the actions that a policy allows on the resource whose ARN ends with this name."""
    return {
        action
        for statement in shown(policy)["Statement"]
        if statement["Effect"] == "Allow" and statement["Resource"].endswith(name)
        for action in statement["Action"]
    }


def is_denied(policy: tuple[str, int], principal: str, action: str) -> bool:
    """Return whether a policy of a queue denies an action to a principal.

    Such a policy has only Deny statements with the condition ArnNotEquals.
    """
    for statement in shown(policy)["Statement"]:
        assert statement["Effect"] == "Deny"
        assert set(statement["Condition"]) == {"ArnNotEquals"}
        excepted = statement["Condition"]["ArnNotEquals"]["aws:PrincipalArn"]
        if action == statement["Action"] and principal != excepted:
            return True
    return False


@pytest.fixture
def stage(sqs, proxy, queue):
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def asked(stage, proxy):
    """Return a function that returns which actions were called on each queue.

    The queues have the names that they have in the docs.
    """
    stage.fill_numbered(12)
    proxy.record(*OPERATIONS.values())

    def asked():
        found = defaultdict(set)
        names = {stage.queue.name: MAIN, stage.dlq.name: DLQ}
        # kombu lists all queues when it connects, unless they are predefined.
        for operation in {*OPERATIONS.values()} - {"ListQueues"}:
            for request in proxy.requests(operation):
                name = request.get("QueueName") or request["QueueUrl"].rpartition("/")[2]
                found[names[name]].add(iam_action(operation))
        return found

    return asked


def test_look(stage, asked):
    """``peek`` makes only calls that its policy grants on each of the two queues."""
    peek(stage.app, stage.queue.name)
    found = asked()
    assert found[DLQ] >= {"sqs:ReceiveMessage", "sqs:ListDeadLetterSourceQueues"}
    for name in (MAIN, DLQ):
        assert found[name] <= granted(LOOK, f":{name}")


def test_dlq_not_predefined(stage, proxy, make_queue):
    """``peek`` finds a dead-letter queue that is not predefined in the attributes of other queues.

    It reads the attributes of all predefined queues, as the page says.
    """
    other = make_queue()
    predefined = {queue.name: {"url": queue.url} for queue in (stage.queue, other)}
    stage.app.conf.broker_transport_options["predefined_queues"] = predefined
    proxy.record("GetQueueAttributes", "ListQueues", "ReceiveMessage")
    peek(stage.app, stage.dlq.name)
    read = {request["QueueUrl"] for request in proxy.requests("GetQueueAttributes")}
    assert read == {stage.queue.url, stage.dlq.url, other.url}
    assert stage.dlq.name not in predefined


def test_redrive(stage, asked):
    """A redrive makes no call that the policy of the dead-letter queue denies."""
    assert stage.redrive().sent == 12
    assert not any(is_denied(WRITERS, SOMEBODY, action) for action in asked()[DLQ])


def test_restore(stage, asked, tmp_path):
    """A restore makes only calls that the page's table for a person who replays shows."""
    stage.redrive(delete=True, dump=tmp_path / "a")
    assert stage.redrive(restore=tmp_path / "a").sent == 12
    _, rows = [rows for rows in tables(ROOT / "docs/queues.md") if rows[0][0] == "action"]
    on_dlq = [row for row in rows if row[1] in ("the dead-letter queue", "both")]
    assert asked()[DLQ] <= {action for row in on_dlq for action in code_spans(row[0])}


def test_writers():
    """The policies allow only workers to send messages to the dead-letter queue."""
    (to_dlq,) = ({*granted(WORKER, f":{DLQ}")},)
    assert to_dlq == {"sqs:SendMessage"}
    assert not is_denied(WRITERS, WORKERS_ROLE, "sqs:SendMessage")
    assert is_denied(WRITERS, SOMEBODY, "sqs:SendMessage")
    assert {s["Resource"] for s in shown(WRITERS)["Statement"]} == {
        QueueArn("aws", "eu-central-1", "123456789012", DLQ).__str__()
    }


def test_redrive_allow_policy(stage):
    """SQS accepts the redrive allow policy of the docs, and a redrive finds its queues.

    The policy names the queues from which dead letters come and to which they go back.
    """
    found = shown(SOURCES)
    assert found["redrivePermission"] == "byQueue"
    assert [QueueArn.parse(arn).name for arn in found["sourceQueueArns"]] == [MAIN]
    found["sourceQueueArns"] = [stage.queue.arn]
    stage.sqs.set_queue_attributes(
        QueueUrl=stage.dlq.url, Attributes={"RedriveAllowPolicy": json.dumps(found)}
    )
    stage.fill_numbered(1)
    assert set(peek(stage.app, stage.dlq.name).by_destination) == {stage.queue.name}


def test_assume_role(monkeypatch):
    """To assume a role, kombu makes only the call that the docs' policy grants."""
    client = boto3.client(
        "sts", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    called = set()

    def note(model, **_):
        called.add(f"sts:{model.name}")

    token = {"AccessKeyId": "k" * 16, "SecretAccessKey": "s", "SessionToken": "t",
             "Expiration": "2030-01-01T00:00:00Z"}  # fmt: skip
    monkeypatch.setattr(
        SQS, "boto3", SimpleNamespace(client=lambda name: client if name == "sts" else None)
    )
    with Stubber(client) as stub:
        stub.add_response("assume_role", {"Credentials": token})
        client.meta.events.register("before-parameter-build", note)
        SQS.Channel.generate_sts_session_token(WORKERS_ROLE, 900)
    assert called == granted(ROLE, WORKERS_ROLE)


def test_table():
    """The DynamoDB store makes exactly the calls that its policy grants."""
    client = boto3.client(
        "dynamodb", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    called = set()

    def note(model, **_):
        called.add(f"dynamodb:{model.name}")
        return SimpleNamespace(status_code=200), {}  # botocore then sends no request

    client.meta.events.register("before-call", note, "note")
    store = DynamoDBStore("mail-records", region="us-east-1")
    store._client = client
    store.add("k", "v", 60)
    store.get("k")
    store.replace("k", "v", "w", 60)
    store.delete("k", "w")
    assert called == granted(STORE, "table/mail-records")


def test_keys(stage, asked):
    """The policy of the KMS keys grants exactly what ``peek`` and a redrive need on each queue."""

    def of_keys(actions):
        return set().union(*(OF_KMS.get(action, set()) for action in actions))

    peek(stage.app, stage.queue.name)
    looked = asked()
    assert (of_keys(looked[DLQ]), of_keys(looked[MAIN])) == (granted(KEYS, "of-mail-dlq"), set())
    stage.redrive()
    for name in (MAIN, DLQ):
        assert of_keys(asked()[name]) == granted(KEYS, f"of-{name}")
