"""Where a letter goes."""

from types import SimpleNamespace

import pytest

from celery_sqs_backoff.deadletter import ATTRIBUTE_NAME
from celery_sqs_backoff.queues import Queue
from celery_sqs_backoff.redrive.broker import Endpoint
from celery_sqs_backoff.redrive.letter import Letter
from celery_sqs_backoff.redrive.route import Route

BASE = "https://sqs.eu-west-1.amazonaws.com/1"
ARN = "arn:aws:sqs:eu-west-1:1:"


def endpoint(name):
    return Endpoint(SimpleNamespace(), f"{BASE}/{name}", None)


def letter(*, moved_from=None, origin=None):
    record = {"DataType": "String", "StringValue": f'{{"origin": "{origin}"}}'}
    return Letter(
        {
            "MessageId": "m",
            "Body": "",
            "Attributes": {"DeadLetterQueueSourceArn": moved_from} if moved_from else {},
            "MessageAttributes": {ATTRIBUTE_NAME: record} if origin else {},
        }
    )


def route(default=None, **options):
    return Route(
        endpoint("dlq"), Queue(f"{BASE}/dlq"), endpoint(default) if default else None, **options
    )


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (letter(moved_from=f"{ARN}a"), "a"),
        (letter(moved_from=f"{ARN}a", origin=f"{ARN}b"), "a"),  # SQS's word before ours
        (letter(origin=f"{ARN}b"), "b"),
        (letter(origin=f"{BASE}/b"), "b"),
        (letter(origin=f"{ARN}b.fifo"), "b.fifo"),
        (letter(), "main"),
    ],
    ids=["sqs", "sqs-and-record", "record-arn", "record-url", "fifo", "default"],
)
def test_sqs_knows_best_then_the_record_then_the_one_queue(found, name):
    assert route("main").destination(found).url == f"{BASE}/{name}"


def test_nothing_known_is_no_destination():
    assert route().destination(letter()) is None


def test_what_is_unknown_says_between_which_queues_to_choose():
    found = route()
    assert found.unknown == "no destination is known: give one (to)"
    found.ambiguous = ("mail", "sms")
    assert found.unknown == "it may be from any of mail, sms: give a destination (to)"


def test_a_destination_that_is_given_beats_all():
    found = letter(moved_from=f"{ARN}a", origin=f"{ARN}b")
    assert route("main", fixed=True).destination(found).name == "main"


def test_a_message_is_never_sent_to_the_queue_it_is_in():
    assert route("main").destination(letter(origin=f"{ARN}dlq")) is None
