"""Bodies: those of kombu, and those that would end a worker or fill its memory."""

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

from celery_sqs_backoff.worker.payload import (
    NotUnderstood,
    celery_payload,
    check_call,
)

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
    """What kombu's Message needs of a channel."""

    codecs = Channel.codecs
    decode_body = Channel.decode_body


def message_of(payload: dict[str, Any]) -> Message:
    payload["properties"]["delivery_tag"] = "tag"
    return Message(payload, channel=Codecs())


@pytest.mark.parametrize("encode", [str, lambda text: base64.b64encode(text.encode()).decode()])
def test_a_message_of_kombu_is_read_as_kombu_reads_it(encode: Any) -> None:
    payload = celery_payload(encode(envelope()))
    assert payload is not None
    message = message_of(payload)
    assert message.body == b'[["x"], {}, {}]'
    assert message.headers["task"] == "t"


@pytest.mark.parametrize(
    "body",
    ["hello", "[1]", "3", "null", "{}", '"a"', '{"Records": []}', "[" * 5000, "aGVsbG8="],
)
def test_something_else_altogether_is_not_a_celery_message(body: str) -> None:
    assert celery_payload(body) is None


@pytest.mark.parametrize("wrong", [[1], "abc", 5, True], ids=repr)
@pytest.mark.parametrize("where", ["headers", "properties", "delivery_info"])
def test_a_list_a_text_or_a_number_where_a_dict_is_due_is_refused(where: str, wrong: Any) -> None:
    changes = {where: wrong}
    if where == "delivery_info":
        changes = {"properties": ENVELOPE["properties"] | changes}
    with pytest.raises(NotUnderstood, match="of type"):
        celery_payload(envelope(**changes))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("task", wrong) for wrong in (["a"], {}, 5)),
        *(("id", wrong) for wrong in (["a"], {}, 5)),
        *(("retries", wrong) for wrong in ("3", -5, 1.5, True, 10**9)),
        *(("timelimit", wrong) for wrong in (7, "ab", [1], [1, 2, 3], ["1", "2"], [-1, None])),
        ("eta", 5),
        ("expires", [5]),
        ("stamped_headers", 5),
        ("stamps", "x"),
        ("argsrepr", {}),
    ],
)
def test_a_header_that_is_not_what_celery_takes_for_granted_is_refused(
    name: str, wrong: Any
) -> None:
    with pytest.raises(NotUnderstood, match=f"its header {name}"):
        celery_payload(envelope(headers=ENVELOPE["headers"] | {name: wrong}))


def test_the_headers_that_celery_writes_are_those_that_are_understood() -> None:
    with Celery("app", set_as_current=False) as app:
        eta = datetime.now(timezone.utc)
        for options in (
            {},
            {"countdown": 5, "expires": 60, "time_limit": 9, "soft_time_limit": 8.5, "retries": 3},
            {"eta": eta, "shadow": "s", "group_id": "g", "stamped_headers": ["a"], "a": "b"},
        ):
            headers = app.amqp.as_task_v2("id", "t", (), {}, **options).headers
            assert celery_payload(dumps(ENVELOPE | {"headers": headers})) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"content-type": [1]},
        {"content-encoding": [1]},
    ],
    ids=repr,
)
def test_a_content_type_that_is_no_text_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotUnderstood):
        celery_payload(envelope(**changes))


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
def test_kombu_makes_a_message_of_whatever_is_not_refused(
    top: dict[str, Any], headers: dict[str, Any], properties: dict[str, Any]
) -> None:
    mixed = ENVELOPE | {
        "headers": ENVELOPE["headers"] | headers,
        "properties": ENVELOPE["properties"] | properties,
    }
    try:
        payload = celery_payload(json.dumps(mixed | top))
    except NotUnderstood:
        return
    if payload is not None:
        message = message_of(payload)
        assert isinstance(message.headers, dict)
        assert isinstance(message.delivery_info, dict)
        assert isinstance(message.headers.get("task", ""), str | None)


@given(st.text() | st.binary().map(lambda raw: base64.b64encode(raw).decode()))
def test_no_text_raises_anything_but_a_refusal(body: str) -> None:
    assert celery_payload(body) is None


def test_keys_of_embed() -> None:
    """The keys of what a task is embedded in are text; pickle, unlike JSON, brings others."""
    with pytest.raises(NotUnderstood):
        check_call([[], {}, {1: 2}])
