"""Where a redrive sends a message: to the queue that the operator names, or to a source queue.

The source queues are those that SQS lists for the dead-letter queue.
"""

import pytest

from celery_sqs_backoff.redrive.message import DlqMessage
from celery_sqs_backoff.redrive.queues import Endpoint, Route
from celery_sqs_backoff.sqs.arns import QueueArn, is_queue_name
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME

BASE = "https://sqs.eu-west-1.amazonaws.com/1"
ARN = "arn:aws:sqs:eu-west-1:1:"


def endpoint(name):
    return Endpoint(QueueArn.parse(f"{ARN}{name}"), Calls(lambda: None, f"{BASE}/{name}"))


def message(*, moved_from=None, origin=None):
    record = {"DataType": "String", "StringValue": f'{{"origin": "{origin}"}}'}
    return DlqMessage(
        {
            "MessageId": "m",
            "Body": "",
            "Attributes": {"DeadLetterQueueSourceArn": moved_from} if moved_from else {},
            "MessageAttributes": {ATTRIBUTE_NAME: record} if origin else {},
        }
    )


def route(*sources, to=None):
    return Route(endpoint("dlq"), tuple(map(endpoint, sources)), endpoint(to) if to else None)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (message(moved_from=f"{ARN}a"), "a"),
        (message(moved_from=f"{ARN}a", origin=f"{ARN}b"), "a"),  # the record may be forged
        (message(origin=f"{ARN}b"), "b"),
        (message(origin=f"{BASE}/b"), "b"),
    ],
    ids=["sqs", "sqs-and-record", "record-arn", "record-url"],
)
def test_goes_to_named_source(found, name):
    """A message goes to the source queue that SQS's attribute or else its record names."""
    assert route("a", "b").destination(found).url == f"{BASE}/{name}"


def test_goes_to_only_source():
    """If a message names no queue, it goes to the source queue if there is only one."""
    assert route("main").destination(message()).name == "main"


@pytest.mark.parametrize(
    "origin",
    [
        f"{ARN}payments",
        f"{ARN}dlq",
        "arn:aws:sqs:eu-west-1:999999999999:main",
        "arn:aws:sqs:us-east-1:1:main",
        "arn:aws:sqs:x:y:../111111111111/payments",
        "http://evil.example/q?x",
        "main",
        f"{ARN}main\\u0000",
    ],
)
@pytest.mark.parametrize("how", ["origin", "moved_from"])
def test_forged_destination(origin, how):
    """If a message names a queue that is no source queue, the redrive does not send it there.

    Otherwise a sender with access to the dead-letter queue could reach other queues.
    """
    found = route("main", "other").destination(message(**{how: origin}))
    assert "give a destination" in found
    assert ".." not in found
    assert "evil" not in found


def test_unknown_destination():
    """If the destination of a message is unknown, the error names the queues to choose from."""
    assert route().destination(message()) == "no destination is known: give one (to)"
    assert "any of mail, sms" in route("mail", "sms").destination(message())


def test_given_destination():
    """If the operator names a destination, all messages go there."""
    found = message(moved_from=f"{ARN}a", origin=f"{ARN}b")
    assert route("a", to="main").destination(found).name == "main"


@pytest.mark.parametrize(
    "text",
    ["", "mail", f"{ARN}", f"{ARN}a/b", f"{ARN}a\n", f" {ARN}a", "arn:aws:sns:eu-west-1:1:a", None,
     f"{ARN}{'a' * 81}", f"{ARN}a.fifo.fifo"],
)  # fmt: skip
def test_invalid_arn(text):
    """A text that is not the ARN of a queue is refused."""
    with pytest.raises(ValueError, match="expected the ARN of a queue"):
        QueueArn.parse(text)


def test_parse_arn():
    """``QueueArn.parse`` finds all parts of an ARN. A name that ends in .fifo is a FIFO queue's."""
    found = QueueArn.parse("arn:aws-cn:sqs:cn-north-1:123456789012:mail.fifo")
    assert (found.partition, found.region, found.account, found.name) == (
        "aws-cn", "cn-north-1", "123456789012", "mail.fifo"
    )  # fmt: skip
    assert found.is_fifo
    assert str(found.sibling("x")) == "arn:aws-cn:sqs:cn-north-1:123456789012:x"


@pytest.mark.parametrize("name", ["a" * 81, "a b", "../a", "", "a.fif", "a\n"])
def test_invalid_queue_name(name):
    """``is_queue_name`` returns False for a text that cannot be the name of a queue."""
    assert not is_queue_name(name)
