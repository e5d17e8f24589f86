"""Reads Celery's envelope (the headers around a task's arguments) from a message body.

The envelope is JSON for every serializer. So name, ID and expiry of a pickled task can be read, but
not its arguments, because this module never unpickles.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ..text import read_body
from .delivery import parse_eta

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A Celery message without the task's arguments.

    Times are seconds since the epoch. ``None`` means that the message has no such field.
    """

    task: str | None
    id: str | None
    content_type: str | None
    eta: float | None
    expires: float | None
    #: All of Celery's headers. Never log them, because ``argsrepr`` quotes the arguments.
    headers: Mapping[str, Any] = field(repr=False)

    @property
    def is_json(self) -> bool:
        """Whether the arguments are JSON."""
        return self.content_type == _JSON


def read_envelope(body: str) -> Envelope | None:
    """Read the envelope from the body of an SQS message.

    The body is plain JSON, or JSON in base64, as kombu writes it by default. Returns ``None`` if
    the body is not a Celery message.
    """
    found = read_body(body)
    if found is None:
        return None
    headers = found.get("headers")
    headers = headers if isinstance(headers, dict) else {}
    task = headers.get("task")
    if not isinstance(task, str) or not isinstance(found.get("body"), str):
        return None
    content_type = found.get("content-type")
    return Envelope(
        task=task,
        id=_text(headers.get("id")),
        content_type=_text(content_type),
        eta=parse_eta(headers.get("eta")),
        expires=parse_eta(headers.get("expires")),
        headers=headers,
    )


def arguments(body: str) -> tuple[Any, Any] | None:
    """Decode a task's arguments, or return ``None`` if they are not JSON.

    The arguments are the user's data. Show them to a person who has asked for them, but never log
    them.
    """
    envelope, found = read_envelope(body), read_body(body)
    if envelope is None or found is None or not envelope.is_json:
        return None
    try:
        payload = found["body"]
        if (found.get("properties") or {}).get("body_encoding") == "base64":
            payload = base64.b64decode(payload, validate=True)
        args, kwargs, _embed = json.loads(payload)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return args, kwargs


def with_headers(body: str, **headers: object) -> str:
    """Return the body with some of Celery's headers replaced, in the body's own encoding.

    Raises:
        ValueError: the body is not a Celery message.
    """
    found = read_body(body)
    if found is None or not isinstance(found.get("headers"), dict):
        raise ValueError("not a Celery message")
    found["headers"] |= headers
    text = json.dumps(found)
    if not body.isascii():  # JSON's escapes would make the text three times as long
        plain = json.dumps(found, ensure_ascii=False)
        # Half a surrogate pair cannot be encoded, so it must stay an escape.
        text = text if any("\ud800" <= c <= "\udfff" for c in plain) else plain
    return text if body.lstrip().startswith("{") else base64.b64encode(text.encode()).decode()


def iso_time(seconds: float) -> str:
    """Write a time in ISO 8601 and UTC, as Celery writes ``eta`` and ``expires``."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
