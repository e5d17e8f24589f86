"""Reading a Celery message from its SQS body: the task's name, ID and expiry, and its arguments."""

import base64
import json
import pickle

import pytest
from celery import Celery
from kombu.serialization import dumps

from celery_sqs_backoff.sqs.envelope import arguments, iso_time, read_envelope, with_headers


def message(*, encode=True, serializer="json", **options):
    """Return the body that Celery and kombu give to SQS."""
    app = Celery("envelope", set_as_current=False, broker="memory://")
    amqp = app.amqp.as_task_v2("42", "mails.send", args=[7], kwargs={"x": "secret"}, **options)
    content_type, content_encoding, body = dumps(amqp.body, serializer=serializer)
    with app.connection() as connection:
        channel = connection.default_channel
        envelope = channel.prepare_message(
            body, 0, content_type, content_encoding, dict(amqp.headers), dict(amqp.properties)
        )
        envelope["body"], encoding = channel.encode_body(envelope["body"], channel.body_encoding)
        envelope["properties"]["body_encoding"] = encoding
    text = json.dumps(envelope)
    return base64.b64encode(text.encode()).decode() if encode else text


@pytest.mark.parametrize("encode", [True, False], ids=["base64", "plain"])
def test_celery_message(encode):
    """``read_envelope`` finds the task's name, ID and expiry, and shows none of its arguments."""
    envelope = read_envelope(message(encode=encode, expires=3600))
    assert (envelope.task, envelope.id, envelope.is_json) == ("mails.send", "42", True)
    assert envelope.expires is not None
    assert "secret" not in repr(envelope)
    assert arguments(message(encode=encode)) == ([7], {"x": "secret"})
    assert envelope.eta is None


def test_pickled_message(monkeypatch):
    """The envelope says that a message is pickled, and its arguments are never unpickled."""
    body = message(serializer="pickle")
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    envelope = read_envelope(body)
    assert (envelope.task, envelope.content_type) == (
        "mails.send",
        "application/x-python-serialize",
    )
    assert not envelope.is_json
    assert arguments(body) is None


def test_deeply_nested_arguments():
    """``arguments`` returns None if they are nested too deeply for the JSON parser.

    An exception would end ``sqs-peek --json --arguments`` at this message.
    """
    deep = "[" * 100_000 + "]" * 100_000
    body = {"content-type": "application/json", "headers": {"task": "a"}, "body": deep}
    assert arguments(json.dumps(body)) is None


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "{}",
        "[]",
        "null",
        '{"headers": {"task": 1}, "body": ""}',
        "aGVsbG8=",
        "{" * 9999,
    ],
)
def test_foreign_message(body):
    """A body that is not a Celery message has no envelope and no arguments."""
    assert read_envelope(body) is None
    assert arguments(body) is None
    if not body.startswith('{"headers'):
        with pytest.raises(ValueError, match="not a Celery message"):
            with_headers(body, expires=None)


@pytest.mark.parametrize("encode", [True, False], ids=["base64", "plain"])
def test_replace_headers(encode):
    """``with_headers`` replaces the given headers and keeps the rest of the message."""
    body = message(encode=encode, expires=3600)
    changed = with_headers(body, expires=iso_time(1_000_000_000))
    assert changed.startswith("{") is not encode
    assert read_envelope(changed).expires == 1_000_000_000
    assert read_envelope(changed).id == "42"
    assert arguments(changed) == arguments(body)
