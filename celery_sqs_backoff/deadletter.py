"""The dead-letter record: what a given-up message carries, so that a person can judge it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .limits import MAX_MESSAGE_ATTRIBUTES, MAX_MESSAGE_BYTES

__all__ = ["ATTRIBUTE_NAME", "DeadLetterRecord", "message_bytes", "with_record"]

#: The one message attribute that we add. It holds JSON.
ATTRIBUTE_NAME = "celery-sqs-backoff"

MAX_MESSAGE_CHARACTERS = 1_000
MAX_TRACEBACK_CHARACTERS = 6_000

_SECRETS = re.compile(
    r"""(?ix)
    (?P<url>\b[a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s/@]*@             # user:password@ in a URL
    | (?P<name>\b(?:authorization|password|passwd|secret|token|api[_-]?key|access[_-]?key
        |signature|x-amz-[a-z-]+)["']?\s*[=:]\s*["']?)(?:(?:bearer|basic)\s+)?[^\s"',;&)]+
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                                # AWS access key ids
    """
)


@dataclass(frozen=True, kw_only=True)
class DeadLetterRecord:
    """Why a message is in the dead-letter queue. Times are seconds since the epoch.

    It never holds a task's arguments. An exception's message may quote them: it is truncated, and
    what looks like a credential is masked in it and in the traceback.
    """

    task: str | None
    id: str | None
    reason: str
    outcome: str | None
    exception_type: str | None = None
    exception_message: str | None = None
    traceback: str | None = None
    attempts: int
    first_received_at: float | None
    failed_at: float
    origin: str
    worker: str
    #: Of a parked message: when its backoff would have ended.
    due_at: float | None = None
    version: int = 1

    def scrubbed(self) -> DeadLetterRecord:
        """Return a copy with credentials masked and long texts cut (a traceback keeps its end)."""
        return replace(
            self,
            exception_message=_cut(_mask(self.exception_message), MAX_MESSAGE_CHARACTERS),
            traceback=_cut(_mask(self.traceback), MAX_TRACEBACK_CHARACTERS, keep_end=True),
        )

    def to_json(self, **extra: Any) -> str:
        """Serialize. ASCII only, so that no character is one that SQS refuses."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({**fields, **extra}, separators=(",", ":"))


def with_record(
    body: str, attributes: Mapping[str, Mapping[str, Any]], record: DeadLetterRecord
) -> dict[str, dict[str, Any]]:
    """Return the message attributes for the dead letter: the message's own, and the record.

    Arguments:
        body: the message's body, for its size only.
        attributes: ``MessageAttributes`` as ReceiveMessage returned them.
        record: what to add.

    SQS takes ten attributes and 1 MiB in all. Attributes beyond the first nine move into the
    record, under ``"attributes"``; texts that do not fit are left out of it, longest first.
    """
    own = {name: _sendable(value) for name, value in attributes.items() if name != ATTRIBUTE_NAME}
    kept = dict(list(own.items())[: MAX_MESSAGE_ATTRIBUTES - 1])
    packed = {name: _jsonable(value) for name, value in own.items() if name not in kept}
    extra = {"attributes": packed} if packed else {}
    room = MAX_MESSAGE_BYTES - len(body.encode()) - _size(kept)
    record = record.scrubbed()
    for smaller in (
        record,
        replace(record, traceback=None),
        replace(record, traceback=None, exception_message=None),
    ):
        text = smaller.to_json(**extra)
        attribute = {ATTRIBUTE_NAME: {"DataType": "String", "StringValue": text}}
        if _size(attribute) <= room:
            return {**kept, **attribute}
    return own  # a body of the full 1 MiB: better a dead letter without its reason than none


def message_bytes(body: str, attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes of a message as SQS counts them against its limit of 1 MiB."""
    return len(body.encode()) + _size(attributes)


def _sendable(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what ReceiveMessage adds and SendMessage refuses (the unused list values)."""
    return {
        key: attribute[key]
        for key in ("DataType", "StringValue", "BinaryValue")
        if attribute.get(key) is not None
    }


def _jsonable(attribute: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in attribute.items()
    }


def _size(attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes that SQS counts: names, types and values."""
    return sum(
        len(name.encode())
        + sum(len(v if isinstance(v, bytes) else v.encode()) for v in value.values())
        for name, value in attributes.items()
    )


def _mask(text: str | None) -> str | None:
    if text is None:
        return None
    return _SECRETS.sub(
        lambda m: f"{m['url'] or m['name'] or ''}***{'@' if m['url'] else ''}", text
    )


def _cut(text: str | None, limit: int, *, keep_end: bool = False) -> str | None:
    if text is None or len(text) <= limit:
        return text
    return f"... {text[-limit:]}" if keep_end else f"{text[:limit]} ..."
