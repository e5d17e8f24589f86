"""The record on a dead letter says why the message was given up. It fits within SQS's limits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.sqs.dead_letter import (
    ATTRIBUTE_NAME,
    DeadLetterRecord,
    message_bytes,
    read_record,
    with_record,
)
from celery_sqs_backoff.sqs.limits import MAX_MESSAGE_BYTES


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


def record_in(attributes):
    return json.loads(attributes[ATTRIBUTE_NAME]["StringValue"])


def size(attributes):
    return sum(len(n) + sum(len(v) for v in value.values()) for n, value in attributes.items())


TEXT = {"DataType": "String", "StringValue": "x"}


def test_own_attributes_kept():
    """A dead letter keeps the message's own attributes unchanged."""
    own = {"trace": TEXT, "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    attributes = with_record("{}", own, record())
    assert {k: v for k, v in attributes.items() if k != ATTRIBUTE_NAME} == own
    assert record_in(attributes)["reason"] == "retry_for is over"


def test_empty_lists():
    """A dead letter leaves out ``StringListValues`` and ``BinaryListValues`` of its attributes.

    Some SQS-compatible servers return these with each attribute, but SendMessage refuses them.
    """
    own = {"trace": {**TEXT, "StringListValues": [], "BinaryListValues": []}}
    assert with_record("{}", own, record())["trace"] == TEXT


@pytest.mark.parametrize(
    ("room", "left_out"),
    [
        (10_000, []),
        (3_000, ["traceback"]),
        (600, ["exception_message", "traceback"]),
    ],
)
def test_texts_left_out(room, left_out):
    """If there is too little room, the record leaves out the traceback, then the error's text."""
    body = "b" * (MAX_MESSAGE_BYTES - room)
    attributes = with_record(body, {}, record(exception_message="m" * 900, traceback="t" * 5_000))
    assert len(body) + size(attributes) <= MAX_MESSAGE_BYTES
    assert [
        n for n in ("exception_message", "traceback") if n not in record_in(attributes)
    ] == left_out


def test_legal_characters():
    """A record holds any text, written in characters that SQS accepts.

    SQS refuses U+FFFE, lone surrogates and most control characters.
    """
    attributes = with_record("{}", {}, record(exception_message="\0\x1b[31m\ud800\ufffe é"))
    assert attributes[ATTRIBUTE_NAME]["StringValue"].isascii()
    assert "\\u0000" in attributes[ATTRIBUTE_NAME]["StringValue"]


def test_forged_attribute():
    """If the sender used the name of our attribute, the record replaces the sender's value."""
    own = {ATTRIBUTE_NAME: {"DataType": "String", "StringValue": '{"reason": "forged"}'}}
    assert record_in(with_record("{}", own, record()))["reason"] == "retry_for is over"


def test_long_names():
    """The record shortens long texts that come from the message.

    The sender chooses the name and ID of the task, which may fill the whole message.
    """
    forged = record(task="x" * 600_000, reason="not understood: " + "x" * 600_000, id="i" * 9_000)
    found = record_in(with_record("b" * 650_000, {}, forged))
    assert found["task"] == "x" * 500
    assert len(json.dumps(found)) < 4_000
    assert len(record_in(with_record("", {}, record(traceback="f" * 50_000)))["traceback"]) < 6_100


texts = st.text(st.characters(codec="utf-8"), max_size=40)
attributes = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=8).map("own-".__add__),
    st.one_of(
        texts.map(lambda text: {"DataType": "String", "StringValue": text}),
        st.binary(max_size=40).map(lambda raw: {"DataType": "Binary", "BinaryValue": raw}),
    ),
    min_size=8,
    max_size=10,
)


@given(attributes, texts, st.integers(0, 9_000), st.sampled_from(["b", "é", "質", "𝄞"]))
def test_limits_of_sqs(own, text, room, character):
    """A dead letter stays within the limits of SQS and loses no attribute.

    This holds for ten attributes, a body of 1 MiB and texts that are not ASCII.
    """
    bytes_left = MAX_MESSAGE_BYTES - room - message_bytes("", own)
    body = character * (bytes_left // len(character.encode()))
    full = record(exception_message=text * 30, traceback=text * 200, task=text)
    sent = with_record(body, own, full)
    assert message_bytes(body, sent) <= MAX_MESSAGE_BYTES
    assert len(sent) <= 10
    assert {k: v for k, v in sent.items() if k != ATTRIBUTE_NAME} == own
    if room >= 1_000:
        assert (ATTRIBUTE_NAME in sent) is (len(own) < 10)


# Reading a record


def message_with_record(text, **system):
    attribute = {"DataType": "String", "StringValue": text}
    return {"MessageAttributes": {ATTRIBUTE_NAME: attribute}, "Attributes": system}


def test_round_trip():
    """``read_record`` returns the record that ``with_record`` has written."""
    written = record(due_at=3.5)
    assert read_record({"MessageAttributes": with_record("{}", {"own": TEXT}, written)}) == written


def test_record_on_moved_message():
    """If SQS itself moved a message to the dead-letter queue, the message's record is ignored.

    A worker sends a dead letter as a new message. So this record is the sender's invention.
    """
    moved = message_with_record(
        '{"reason": "parked"}', DeadLetterQueueSourceArn="arn:aws:sqs:eu-west-1:1:mails"
    )
    assert read_record(moved) is None


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"MessageAttributes": None},
        {"MessageAttributes": {ATTRIBUTE_NAME: None}},
        {"MessageAttributes": {ATTRIBUTE_NAME: {"DataType": "Binary", "BinaryValue": b"{}"}}},
        message_with_record(""),
        message_with_record("[]"),
        message_with_record("null"),
        message_with_record("{"),
        message_with_record("[" * 500_000),
        message_with_record('{"a":' * 100_000 + "1" + "}" * 100_000),
    ],
    ids=range(10),
)
def test_not_a_record(message):
    """``read_record`` returns None for a message without a valid record."""
    assert read_record(message) is None


@pytest.mark.parametrize(
    ("field", "value", "read_as"),
    [
        ("attempts", "-5", 0),
        ("attempts", "true", 0),
        ("attempts", '"7"', 0),
        ("attempts", "1e3", 0),
        ("attempts", "9" * 900_000, 0),
        ("attempts", "7", 7),
        ("due_at", "NaN", None),
        ("due_at", "Infinity", None),
        ("due_at", "1e999", None),
        ("due_at", "9" * 900_000, None),
        ("due_at", '"soon"', None),
        ("due_at", "12", 12.0),
        ("failed_at", "null", 0.0),
        ("reason", "{}", ""),
        ("reason", '"\\ud800"', "?"),
        ("task", "[1]", None),
        ("task", '"' + "x" * 900_000 + '"', "x" * 500),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_field(field, value, read_as):
    """A field of a record with an invalid value is read as if it were missing."""
    assert getattr(read_record(message_with_record(f'{{"{field}": {value}}}')), field) == read_as


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_reading_never_raises(text):
    """``read_record`` never raises, whatever text the attribute holds."""
    read_record(message_with_record(text))
    read_record(message_with_record(f'{{"attempts": {text}, "task": {text}}}'))
