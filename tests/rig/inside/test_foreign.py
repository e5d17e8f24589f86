"""Messages that Celery has not sent: bodies as AWS documents them, and adapters that fail."""

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
from celery_sqs_backoff.worker.foreign import IGNORED, Foreign
from celery_sqs_backoff.worker.payload import NotUnderstood

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


def test_an_s3_notification_is_a_list_of_records_with_decoded_keys() -> None:
    assert s3("t")(text(S3_EVENT), {}) == ("t", [[S3_RECORD]], {})


def test_what_s3_leaves_out_is_none() -> None:
    assert s3("t")(text(S3_REMOVED), {})[1][0][0]["size"] is None  # type: ignore[index]


def test_the_test_event_of_s3_is_ignored() -> None:
    assert s3("t")(text(S3_TEST_EVENT), {}) is IGNORE


def test_an_sns_notification() -> None:
    assert sns("t")(text(SNS_NOTIFICATION), {}) == (
        "t",
        [],
        {
            "message": "Hello world!",
            "subject": "My First Message",
            "topic_arn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
            "attributes": {"store": "example_corp"},
        },
    )


def test_an_sns_message_with_raw_delivery() -> None:
    """Its attributes are those of the SQS message."""
    attributes = {"store": "example_corp", "picture": b"\xff"}
    assert sns("t")("Hello world!", attributes) == (
        "t",
        [],
        {
            "message": "Hello world!",
            "subject": None,
            "topic_arn": None,
            "attributes": {"store": "example_corp"},
        },
    )


@pytest.mark.parametrize("wrap", [lambda m: text(SNS_NOTIFICATION | {"Message": m}), str])
def test_s3_by_way_of_sns(wrap: Any) -> None:
    assert sns(s3("t"))(wrap(text(S3_EVENT)), {}) == ("t", [[S3_RECORD]], {})
    assert sns(s3("t"))(wrap(text(S3_TEST_EVENT)), {}) is IGNORE


def test_an_eventbridge_event() -> None:
    assert eventbridge("t")(text(EVENTBRIDGE_EVENT), {}) == ("t", [EVENTBRIDGE_EVENT], {})


@pytest.mark.parametrize("body", NONE_OF_IT)
@pytest.mark.parametrize("adapter", [s3("t"), eventbridge("t")])
def test_other_bodies_are_not_understood(adapter: foreign.Adapter, body: str) -> None:
    assert adapter(body, {}) is None


# In the worker


def a_message(body: str) -> dict[str, Any]:
    return {"MessageId": "11111111-2222-4333-8444-555555555555", "Body": body}


def adapters(**by_queue: Any) -> Foreign:
    app = SimpleNamespace(conf={"sqs_backoff": {"foreign": by_queue}}, amqp=APP.amqp)
    return Foreign(SimpleNamespace(app=app, strategies={"t"}, hostname="worker@host"))


def test_the_message_becomes_a_task_whose_id_is_the_message_s() -> None:
    payload = adapters(uploads=s3("t")).payload("uploads", a_message(text(S3_EVENT)))
    assert payload is not None
    assert payload["headers"]["task"] == "t"
    assert payload["headers"]["id"] == "11111111-2222-4333-8444-555555555555"
    args, kwargs, _ = json.loads(base64.b64decode(payload["body"]))
    assert (args, kwargs) == ([[S3_RECORD]], {})
    assert "flower" not in text({**payload, "body": ""}), "no arguments in the headers"


def test_a_queue_without_an_adapter_has_no_foreign_messages() -> None:
    assert adapters(uploads=s3("t")).payload("mail", a_message(text(S3_EVENT))) is None


def test_nothing_is_to_be_done_for_what_is_ignored() -> None:
    assert adapters(uploads=s3("t")).payload("uploads", a_message(text(S3_TEST_EVENT))) is IGNORED


def test_an_adapter_may_be_named() -> None:
    named = adapters(q="tests.rig.inside.test_foreign.named_adapter").payload("q", a_message("x"))
    assert named is not None


def named_adapter(body: str, attributes: Any) -> Any:
    return "t", [body], {}


def test_an_adapter_gets_the_message_attributes_by_name() -> None:
    seen = []
    message = a_message("x") | {
        "MessageAttributes": {
            "text": {"DataType": "String", "StringValue": "a"},
            "bytes": {"DataType": "Binary", "BinaryValue": b"b"},
        }
    }
    adapters(q=lambda body, attributes: seen.append((body, attributes)) or ("t", [], {})).payload(
        "q", message
    )
    assert seen == [("x", {"text": "a", "bytes": b"b"})]


def raises(body: str, attributes: Any) -> Any:
    raise KeyError(body)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


class Lazy:
    """Arguments that are read only when somebody asks for them."""

    def __iter__(self) -> Any:
        raise RuntimeError("attack at dawn")


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (raises, "the adapter raised KeyError"),
        (lambda body, attributes: None, "does not understand it"),
        (lambda body, attributes: ("unknown", [], {}), "not registered"),
        (lambda body, attributes: "t", r"no \(task, args, kwargs\)"),
        (lambda body, attributes: ("t", [object()], {}), "in JSON"),
        (lambda body, attributes: ("t", 5, {}), "in JSON"),
        (lambda body, attributes: ("t", [], 5), "in JSON"),
        (lambda body, attributes: ([], [], {}), "not registered"),
        (lambda body, attributes: ("t", nested(5_000), {}), "in JSON"),
        (lambda body, attributes: ("t", Lazy(), {}), r"no \(task, args, kwargs\)"),
    ],
)
def test_an_adapter_that_fails_leaves_the_message_not_understood(adapter: Any, why: str) -> None:
    with pytest.raises(NotUnderstood, match=why) as caught:
        adapters(q=adapter).payload("q", a_message("attack at dawn"))
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
def test_no_body_does_more_than_not_being_understood(
    adapter: foreign.Adapter, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        payload = adapters(q=adapter).payload("q", a_message(text(base | changes)))
    except NotUnderstood:
        return
    assert payload is IGNORED or (payload is not None and payload["headers"]["task"] == "t")


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_a_request_of_sns_to_confirm_a_subscription_is_not_a_task(kind: str) -> None:
    """https://docs.aws.amazon.com/sns/latest/dg/sns-message-and-json-formats.html"""
    body = {
        "Type": kind,
        "MessageId": "165545c9-2a5c-472c-8df2-7ff2be2b3b1b",
        "Token": "2336412f37",
        "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
        "Message": "You have chosen to subscribe to the topic.",
        "SubscribeURL": "https://sns.us-west-2.amazonaws.com/?Action=ConfirmSubscription",
    }
    assert sns("t")(text(body), {}) is None


def test_an_adapter_that_exits_ends_no_thread() -> None:
    def adapter(body: str, attributes: Any) -> Any:
        raise SystemExit(2)

    found = adapters(q=adapter)
    with pytest.raises(NotUnderstood, match="SystemExit"):
        found.payload("q", {"Body": "b", "MessageId": "m"})
