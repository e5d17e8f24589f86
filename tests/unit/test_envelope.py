"""What can be told of a task without its arguments."""

import base64
import json
import pickle

import pytest
from celery import Celery
from kombu.serialization import dumps

from celery_sqs_backoff.sqs.envelope import arguments, iso_time, read_envelope, with_headers


def message(*, encode=True, serializer="json", **options):
    """A message's body, as Celery and kombu write it."""
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
    """An envelope shows the task, ID and expiry of a Celery message."""
    envelope = read_envelope(message(encode=encode, expires=3600))
    assert (envelope.task, envelope.id, envelope.is_json) == ("mails.send", "42", True)
    assert envelope.expires is not None
    assert "secret" not in repr(envelope)
    assert arguments(message(encode=encode)) == ([7], {"x": "secret"})
    assert envelope.eta is None


def test_pickled_message(monkeypatch):
    """A pickled message is shown as such and never unpickled."""
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
    """Arguments with endless nesting are not decoded.

    One such message ended ``sqs-peek --json --arguments``.
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
    """Any other body is not a Celery message."""
    assert read_envelope(body) is None
    assert arguments(body) is None
    if not body.startswith('{"headers'):
        with pytest.raises(ValueError, match="not a Celery message"):
            with_headers(body, expires=None)


@pytest.mark.parametrize("encode", [True, False], ids=["base64", "plain"])
def test_replace_headers(encode):
    """Replacing headers keeps the rest of the message."""
    body = message(encode=encode, expires=3600)
    changed = with_headers(body, expires=iso_time(1_000_000_000))
    assert changed.startswith("{") is not encode
    assert read_envelope(changed).expires == 1_000_000_000
    assert read_envelope(changed).id == "42"
    assert arguments(changed) == arguments(body)
