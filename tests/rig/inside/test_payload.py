"""The worker reads message bodies of kombu, and refuses bodies that would harm it."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.transport.virtual import Channel, Message
from kombu.utils.json import dumps

from celery_sqs_backoff.worker.payload import NotUnderstood, celery_payload

BODY = base64.b64encode(b'[["x"], {}, {}]').decode()
ENVELOPE: dict[str, Any] = {
    "body": BODY,
    "content-encoding": "utf-8",
    "content-type": "application/json",
    "headers": {"task": "t", "id": "i", "lang": "py"},
    "properties": {
        "body_encoding": "base64",
        "correlation_id": "i",
        "delivery_info": {"exchange": "", "routing_key": "q"},
        "delivery_tag": "d",
    },
}


def envelope(**changes: Any) -> str:
    return json.dumps(ENVELOPE | changes)


class Codecs:
    """The part of a channel that kombu's Message needs."""

    codecs = Channel.codecs
    decode_body = Channel.decode_body


def message_of(payload: dict[str, Any]) -> Message:
    payload["properties"]["delivery_tag"] = "tag"
    return Message(payload, channel=Codecs())


@pytest.mark.parametrize("encode", [str, lambda text: base64.b64encode(text.encode()).decode()])
def test_message_of_kombu(encode: Any) -> None:
    """The worker reads a body of kombu as kombu itself does."""
    message = message_of(celery_payload(encode(envelope())))
    assert message.body == b'[["x"], {}, {}]'
    assert message.headers["task"] == "t"


@pytest.mark.parametrize(
    "body",
    ["hello", "[1]", "3", "null", "{}", '"a"', '{"Records": []}', "[" * 5000, "aGVsbG8="],
)
def test_something_else(body: str) -> None:
    """The worker refuses a body without kombu's fields, because it is no Celery message."""
    with pytest.raises(NotUnderstood, match="not a Celery message"):
        celery_payload(body)


@pytest.mark.parametrize(
    "changes",
    [
        *({"headers": wrong} for wrong in ([1], "abc", 5, True)),
        *({"properties": wrong} for wrong in ([1], "abc", 5, True)),
        {"properties": ENVELOPE["properties"] | {"delivery_info": [1]}},
        *({"headers": {name: [["a"]]}} for name in ("task", "id", "shadow", "eta", "expires")),
        *({"headers": {name: 5}} for name in ("timelimit", "stamps", "stamped_headers")),
        {"headers": {"retries": "3"}},
    ],
    ids=repr,
)
def test_wrong_type(changes: dict[str, Any]) -> None:
    """The worker refuses a body if a part or a header has a wrong type."""
    with pytest.raises(NotUnderstood, match="of type"):
        celery_payload(envelope(**changes))


@pytest.mark.parametrize("limits", [["a", "b"], [None, "x"], [10**400, None], [-1, None]], ids=repr)
def test_wrong_time_limit(limits: list[Any]) -> None:
    """The worker refuses a time limit that is no number of seconds.

    A prefork worker would end with an error when it starts the timer.
    """
    with pytest.raises(NotUnderstood, match="pair of numbers"):
        celery_payload(envelope(headers={"timelimit": limits}))


def test_headers_of_celery() -> None:
    """The worker accepts all headers that Celery writes."""
    with Celery("app", set_as_current=False) as app:
        eta = datetime.now(timezone.utc)
        for options in (
            {},
            {"countdown": 5, "expires": 60, "time_limit": 9, "soft_time_limit": 8.5, "retries": 3},
            {"eta": eta, "shadow": "s", "group_id": "g", "stamped_headers": ["a"], "a": "b"},
        ):
            headers = app.amqp.as_task_v2("id", "t", (), {}, **options).headers
            assert celery_payload(dumps(ENVELOPE | {"headers": headers}))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
HEADERS = ["task", "id", "eta", "expires", "retries", "timelimit", "stamped_headers"]
PROPERTIES = ["delivery_info", "delivery_tag", "priority", "correlation_id"]


@given(
    top=st.dictionaries(st.sampled_from(sorted(ENVELOPE.keys() - {"body"})), ANY_JSON),
    headers=st.dictionaries(st.sampled_from(HEADERS), ANY_JSON),
    properties=st.dictionaries(st.sampled_from(PROPERTIES), ANY_JSON),
)
@example(top={"headers": None, "properties": None}, headers={}, properties={})
def test_any_envelope(
    top: dict[str, Any], headers: dict[str, Any], properties: dict[str, Any]
) -> None:
    """kombu can make a message of each body that the worker does not refuse."""
    mixed = ENVELOPE | {
        "headers": ENVELOPE["headers"] | headers,
        "properties": ENVELOPE["properties"] | properties,
    }
    try:
        message = message_of(celery_payload(json.dumps(mixed | top)))
    except NotUnderstood:
        return
    assert isinstance(message.headers, dict)
    assert isinstance(message.delivery_info, dict)
    assert isinstance(message.headers.get("task", ""), str | None)


@given(st.text() | st.binary().map(lambda raw: base64.b64encode(raw).decode()))
def test_any_text(body: str) -> None:
    """The worker refuses any other text with NotUnderstood, and raises no other error."""
    with pytest.raises(NotUnderstood):
        celery_payload(body)
