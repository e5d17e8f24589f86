"""Adapters, which make tasks of messages that Celery has not sent, such as S3's notifications."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff import foreign
from celery_sqs_backoff.foreign import IGNORE, eventbridge, s3, sns
from celery_sqs_backoff.worker.payload import IGNORED, NotUnderstood, Payloads

APP = Celery("foreign", set_as_current=False)

#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/notification-content-structure.html
S3_EVENT = {
    "Records": [
        {
            "eventVersion": "2.1",
            "eventSource": "aws:s3",
            "awsRegion": "us-west-2",
            "eventTime": "1970-01-01T00:00:00.000Z",
            "eventName": "ObjectCreated:Put",
            "userIdentity": {"principalId": "AIDAJDPLRKLG7UEXAMPLE"},
            "requestParameters": {"sourceIPAddress": "127.0.0.1"},
            "responseElements": {
                "x-amz-request-id": "C3D13FE58DE4C810",
                "x-amz-id-2": "FMyUVURIY8/IgAtTv8xRjskZQpcIZ9KG4V5Wp6S7S/JRWeUWerMUE5JgHvANOjpD",
            },
            "s3": {
                "s3SchemaVersion": "1.0",
                "configurationId": "testConfigRule",
                "bucket": {
                    "name": "amzn-s3-demo-bucket",
                    "ownerIdentity": {"principalId": "A3NL1KOZZKExample"},
                    "arn": "arn:aws:s3:::amzn-s3-demo-bucket",
                },
                "object": {
                    "key": "red+flower%C3%A9.jpg",
                    "size": 1024,
                    "eTag": "d41d8cd98f00b204e9800998ecf8427e",
                    "versionId": "096fKKXTRTtl3on89fVO.nfljtsv6qko",
                    "sequencer": "0055AED6DCD90281E5",
                },
            },
        }
    ]
}
S3_RECORD = {
    "event": "ObjectCreated:Put",
    "bucket": "amzn-s3-demo-bucket",
    "key": "red flower\u00e9.jpg",
    "size": 1024,
    "etag": "d41d8cd98f00b204e9800998ecf8427e",
    "version_id": "096fKKXTRTtl3on89fVO.nfljtsv6qko",
    "sequencer": "0055AED6DCD90281E5",
    "time": "1970-01-01T00:00:00.000Z",
    "region": "us-west-2",
}
S3_REMOVED = {
    "Records": [
        {
            "eventName": "ObjectRemoved:DeleteMarkerCreated",
            "s3": {"bucket": {"name": "b"}, "object": {"key": "k", "sequencer": "00"}},
        }
    ]
}
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/how-to-enable-disable-notification-intro.html
S3_TEST_EVENT = {
    "Service": "Amazon S3",
    "Event": "s3:TestEvent",
    "Time": "2014-10-13T15:57:02.089Z",
    "Bucket": "amzn-s3-demo-bucket",
    "RequestId": "5582815E1AEA5ADF",
    "HostId": "8cLeGAmw098X5cv4Zkwcmo8vvZa3eH3eKxsPzbB9wrR+YstdA6Knx4Ip8EXAMPLE",
}
#: https://docs.aws.amazon.com/sns/latest/dg/sns-message-and-json-formats.html
SNS_NOTIFICATION = {
    "Type": "Notification",
    "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
    "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
    "Subject": "My First Message",
    "Message": "Hello world!",
    "Timestamp": "2012-05-02T00:54:06.655Z",
    "SignatureVersion": "1",
    "Signature": "EXAMPLEw6JRN...",
    "SigningCertURL": "https://sns.us-west-2.amazonaws.com/SimpleNotificationService-f.pem",
    "UnsubscribeURL": "https://sns.us-west-2.amazonaws.com/?Action=Unsubscribe",
    "MessageAttributes": {"store": {"Type": "String", "Value": "example_corp"}},
}
#: https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-events-structure.html
EVENTBRIDGE_EVENT = {
    "version": "0",
    "id": "6a7e8feb-b491-4cf7-a9f1-bf3703467718",
    "detail-type": "EC2 Instance State-change Notification",
    "source": "aws.ec2",
    "account": "111122223333",
    "time": "2017-12-22T18:43:48Z",
    "region": "us-west-1",
    "resources": ["arn:aws:ec2:us-west-1:123456789012:instance/i-1234567890abcdef0"],
    "detail": {"instance-id": "i-1234567890abcdef0", "state": "terminated"},
}
NONE_OF_IT = [
    "",
    "hello",
    "[1]",
    "3",
    "null",
    "{}",
    '{"Records": []}',
    '{"Records": 5}',
    "[" * 9999,
]


def text(value: Any) -> str:
    return json.dumps(value)


def through_sns(message: str) -> str:
    return text(SNS_NOTIFICATION | {"Message": message})


SNS_CALL: dict[str, Any] = {
    "message": "Hello world!",
    "subject": "My First Message",
    "topic_arn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
    "attributes": {"store": "example_corp"},
}
RAW_CALL: dict[str, Any] = SNS_CALL | {"subject": None, "topic_arn": None}
ATTRIBUTES = {"store": "example_corp", "picture": b"\xff"}


@pytest.mark.parametrize(
    ("adapter", "body", "call"),
    [
        pytest.param(s3("t"), text(S3_EVENT), ("t", [[S3_RECORD]], {}), id="S3"),
        pytest.param(s3("t"), text(S3_TEST_EVENT), IGNORE, id="S3 test event"),
        pytest.param(sns("t"), text(SNS_NOTIFICATION), ("t", [], SNS_CALL), id="SNS"),
        pytest.param(sns("t"), "Hello world!", ("t", [], RAW_CALL), id="SNS, raw"),
        pytest.param(
            sns(s3("t")), through_sns(text(S3_EVENT)), ("t", [[S3_RECORD]], {}), id="S3 by SNS"
        ),
        pytest.param(sns(s3("t")), text(S3_EVENT), ("t", [[S3_RECORD]], {}), id="S3 by SNS, raw"),
        pytest.param(
            sns(s3("t")), through_sns(text(S3_TEST_EVENT)), IGNORE, id="test event by SNS"
        ),
        pytest.param(
            eventbridge("t"),
            text(EVENTBRIDGE_EVENT),
            ("t", [EVENTBRIDGE_EVENT], {}),
            id="EventBridge",
        ),
    ],
)
def test_adapter(adapter: foreign.Adapter, body: str, call: Any) -> None:
    """An adapter turns a notification of AWS into a call of the task, or ignores it.

    The key of an S3 object is decoded.
    """
    assert adapter(body, ATTRIBUTES) == call


def test_value_missing() -> None:
    """The task gets None for a value that S3 leaves out."""
    assert s3("t")(text(S3_REMOVED), {})[1][0][0]["size"] is None  # type: ignore[index]


@pytest.mark.parametrize("body", NONE_OF_IT)
@pytest.mark.parametrize("adapter", [s3("t"), eventbridge("t")])
def test_other_body(adapter: foreign.Adapter, body: str) -> None:
    """An adapter returns None for a body that is no notification of its service."""
    assert adapter(body, {}) is None


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_sns_confirmation(kind: str) -> None:
    """The adapter of SNS makes no task of a request to confirm a subscription.

    A person must answer it:
    https://docs.aws.amazon.com/sns/latest/dg/sns-message-and-json-formats.html
    """
    body = {"Type": kind, "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic", "Message": "x"}
    assert sns("t")(text(body), {}) is None


# How the worker uses an adapter


def a_message(body: str) -> dict[str, Any]:
    return {"MessageId": "11111111-2222-4333-8444-555555555555", "Body": body}


def adapters(**by_queue: Any) -> Payloads:
    app = SimpleNamespace(conf={"sqs_backoff": {"foreign": by_queue}}, amqp=APP.amqp)
    return Payloads(SimpleNamespace(app=app, strategies={"t"}, hostname="worker@host"))


def test_task_of_message() -> None:
    """The task has the ID of the SQS message. Its headers do not show the arguments."""
    payload = adapters(uploads=s3("t")).read("uploads", a_message(text(S3_EVENT)))
    assert payload["headers"]["task"] == "t"
    assert payload["headers"]["id"] == "11111111-2222-4333-8444-555555555555"
    args, kwargs, _ = json.loads(base64.b64decode(payload["body"]))
    assert (args, kwargs) == ([[S3_RECORD]], {})
    assert "flower" not in text({**payload, "body": ""})


def test_queue_without_adapter() -> None:
    """The worker uses an adapter only for the queue that the setting names."""
    with pytest.raises(NotUnderstood, match="not a Celery message"):
        adapters(uploads=s3("t")).read("mail", a_message(text(S3_EVENT)))


def test_ignored() -> None:
    """The worker reads a message that needs no task, such as S3's test event, as IGNORED."""
    assert adapters(uploads=s3("t")).read("uploads", a_message(text(S3_TEST_EVENT))) is IGNORED


def named_adapter(body: str, attributes: Any) -> Any:
    assert attributes == {"text": "a", "bytes": b"b"}
    return "t", [body], {}


def test_adapter_by_name() -> None:
    """The setting may give an adapter by its import path. The adapter gets message attributes."""
    attributes = {
        "text": {"DataType": "String", "StringValue": "a"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"b"},
    }
    message = a_message("x") | {"MessageAttributes": attributes}
    named = adapters(q="tests.rig.inside.test_foreign.named_adapter").read("q", message)
    assert json.loads(base64.b64decode(named["body"]))[0] == ["x"]


def raises(exc: BaseException) -> Any:
    def adapter(body: str, attributes: Any) -> Any:
        raise exc

    return adapter


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


class Lazy:
    """Arguments that raise an error when they are read."""

    def __iter__(self) -> Any:
        raise RuntimeError("attack at dawn")


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (raises(KeyError("attack at dawn")), "the adapter raised KeyError"),
        (raises(SystemExit(2)), "the adapter raised SystemExit"),
        (lambda body, attributes: None, "does not understand it"),
        (lambda body, attributes: ("unknown", [], {}), "not registered"),
        (lambda body, attributes: "t", r"not return a \(task, args, kwargs\)"),
        (lambda body, attributes: ("t", [object()], {}), "JSON can encode"),
        (lambda body, attributes: ("t", 5, {}), "JSON can encode"),
        (lambda body, attributes: ("t", [], 5), "JSON can encode"),
        (lambda body, attributes: ([], [], {}), "not registered"),
        (lambda body, attributes: ("t", nested(5_000), {}), "JSON can encode"),
        (lambda body, attributes: ("t", Lazy(), {}), r"not return a \(task, args, kwargs\)"),
    ],
)
def test_adapter_fails(adapter: Any, why: str) -> None:
    """If an adapter fails, the worker raises NotUnderstood, and does not quote the body."""
    with pytest.raises(NotUnderstood, match=why) as caught:
        adapters(q=adapter).read("q", a_message("attack at dawn"))
    assert "attack" not in str(caught.value)


ANY_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    adapter=st.sampled_from([s3("t"), sns("t"), sns(s3("t")), eventbridge("t")]),
    base=st.sampled_from([S3_EVENT, S3_TEST_EVENT, SNS_NOTIFICATION, EVENTBRIDGE_EVENT, {}]),
    changes=st.dictionaries(
        st.sampled_from(["Records", "Message", "MessageAttributes", "detail", "Type", "Subject"]),
        ANY_JSON,
    ),
)
def test_any_body(adapter: foreign.Adapter, base: dict[str, Any], changes: dict[str, Any]) -> None:
    """The worker reads any body as a task or as IGNORED, or raises NotUnderstood."""
    try:
        payload = adapters(q=adapter).read("q", a_message(text(base | changes)))
    except NotUnderstood:
        return
    assert payload is IGNORED or payload["headers"]["task"] == "t"
