"""What a dead letter carries, within SQS's limits."""

import json

import pytest

from celery_sqs_backoff.deadletter import ATTRIBUTE_NAME, DeadLetterRecord, with_record
from celery_sqs_backoff.limits import MAX_MESSAGE_BYTES


def record(**facts):
    defaults = {
        "task": "mails.send",
        "id": "42",
        "reason": "retry_for is over",
        "outcome": "RETRYABLE",
        "exception_type": "requests.ConnectionError",
        "exception_message": "provider is down",
        "traceback": "Traceback ...",
        "attempts": 7,
        "first_received_at": 1.0,
        "failed_at": 2.0,
        "origin": "arn:aws:sqs:eu-west-1:1:mails",
        "worker": "celery@host",
    }
    return DeadLetterRecord(**{**defaults, **facts})


def read(attributes):
    return json.loads(attributes[ATTRIBUTE_NAME]["StringValue"])


def size(attributes):
    return sum(len(n) + sum(len(v) for v in value.values()) for n, value in attributes.items())


TEXT = {"DataType": "String", "StringValue": "x"}


def test_the_messages_own_attributes_are_kept_as_they_are():
    own = {"trace": TEXT, "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    attributes = with_record("{}", own, record())
    assert {k: v for k, v in attributes.items() if k != ATTRIBUTE_NAME} == own
    assert read(attributes)["reason"] == "retry_for is over"


def test_empty_lists_that_receive_returns_are_not_sent_back():
    """SendMessage refuses StringListValues, which some servers return with every attribute."""
    own = {"trace": {**TEXT, "StringListValues": [], "BinaryListValues": []}}
    assert with_record("{}", own, record())["trace"] == TEXT


def test_ten_attributes_make_room_for_the_record_without_losing_one():
    own = {f"a{i}": TEXT for i in range(9)} | {"raw": {"DataType": "Binary", "BinaryValue": b"\0"}}
    attributes = with_record("{}", own, record())
    assert len(attributes) == 10
    packed = read(attributes)["attributes"]
    assert set(attributes) - {ATTRIBUTE_NAME} | set(packed) == set(own)
    assert packed == {"raw": {"DataType": "Binary", "BinaryValue": "AA=="}}


def test_a_second_dead_letter_replaces_the_first_ones_record():
    own = with_record("{}", {}, record(reason="worker lost"))
    assert read(with_record("{}", own, record()))["reason"] == "retry_for is over"


@pytest.mark.parametrize(
    ("room", "left_out"),
    [
        (10_000, []),
        (3_000, ["traceback"]),
        (600, ["exception_message", "traceback"]),
    ],
)
def test_texts_that_do_not_fit_are_left_out_longest_first(room, left_out):
    body = "b" * (MAX_MESSAGE_BYTES - room)
    attributes = with_record(body, {}, record(exception_message="m" * 900, traceback="t" * 5_000))
    assert len(body) + size(attributes) <= MAX_MESSAGE_BYTES
    assert [n for n in ("exception_message", "traceback") if n not in read(attributes)] == left_out


def test_a_full_message_is_dead_lettered_without_its_record():
    assert with_record("b" * MAX_MESSAGE_BYTES, {"t": TEXT}, record()) == {"t": TEXT}


def test_any_text_becomes_characters_that_sqs_accepts():
    """SQS refuses U+FFFE, lone surrogates and most control characters."""
    attributes = with_record("{}", {}, record(exception_message="\0\x1b[31m\ud800\ufffe é"))
    assert attributes[ATTRIBUTE_NAME]["StringValue"].isascii()
    assert "\\u0000" in attributes[ATTRIBUTE_NAME]["StringValue"]


@pytest.mark.parametrize(
    "text",
    [
        "GET https://bob:hunter2@mail.example/send",
        "Authorization: Bearer hunter2",
        "authorization='Basic hunter2'",
        "password=hunter2 is wrong",
        '{"api_key": "hunter2"}',
        "?X-Amz-Signature=hunter2&x=1",
        "token: hunter2",
    ],
)
def test_what_looks_like_a_credential_is_masked(text):
    scrubbed = record(exception_message=text, traceback=f"ValueError: {text}").scrubbed()
    assert "hunter2" not in scrubbed.exception_message
    assert "hunter2" not in scrubbed.traceback


def test_aws_key_ids_are_masked():
    assert (
        "AKIA" not in record(exception_message="AKIAIOSFODNN7EXAMPLE").scrubbed().exception_message
    )


def test_ordinary_text_is_left_alone():
    text = "POST https://mail.example/v1/send?page=2 answered 503: try later"
    assert record(exception_message=text).scrubbed().exception_message == text


def test_a_long_traceback_keeps_its_end_where_the_error_is():
    scrubbed = record(traceback="frame\n" * 5_000 + "ValueError: boom").scrubbed()
    assert len(scrubbed.traceback) < 6_100
    assert scrubbed.traceback.endswith("ValueError: boom")
