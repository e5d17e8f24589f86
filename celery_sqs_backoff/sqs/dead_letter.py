"""Reads and writes the record on a dead letter, which says why a task was given up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..text import read_json_object
from .limits import MAX_BATCH_ENTRIES, MAX_MESSAGE_ATTRIBUTES, MAX_MESSAGE_BYTES
from .redact import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS

_Key = TypeVar("_Key")

#: The message attribute that holds a dead letter's record, as JSON.
ATTRIBUTE_NAME = "celery-sqs-backoff"

#: The message attribute that marks a replay. A replay is a message that ``sqs-redrive`` has sent
#: from a dead-letter queue to another queue. The mark stays if the message becomes a dead letter
#: again.
REPLAY_ATTRIBUTE = "celery-sqs-backoff-replay"

#: A longer mark of a replay is not read, because a sender may have written anything there.
_MAX_MARK_CHARACTERS = 1_000

#: Names and IDs in a record are cut to this many characters, because the message's sender chooses
#: most of them.
_MAX_NAME_CHARACTERS = 500

#: The other texts in a record are cut to these lengths. The 10 more characters allow for the dots
#: that mark an earlier cut.
_MAX_CHARACTERS = {
    "exception_message": MAX_MESSAGE_CHARACTERS + 10,
    "traceback": MAX_TRACEBACK_CHARACTERS + 10,
}

_TEXTS = (
    *("task", "id", "reason", "outcome", "exception_type", "exception_message", "traceback"),
    *("origin", "worker", "trace"),
)

#: The keys of a message attribute that SendMessage accepts. ReceiveMessage adds keys with empty
#: lists.
_VALUE_KEYS = ("DataType", "StringValue", "BinaryValue")


@dataclass(frozen=True, kw_only=True)
class DeadLetterRecord:
    """Why a message is in the dead-letter queue. Times are seconds since the epoch.

    It has no field for a task's arguments, but an exception's message may quote them. Take texts of
    errors from :class:`~.redact.ErrorText`, which masks text that looks like a credential.
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
    #: Time at which the delay of a parked message ends. A worker parks a message (sends it to the
    #: dead-letter queue) if too many messages of the queue are hidden already.
    due_at: float | None = None
    #: The span of the last run, as a W3C ``traceparent``. The span of a replay links to it.
    trace: str | None = None
    version: int = 1

    def to_json(self) -> str:
        """Serialize as ASCII, because SQS refuses some other characters."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(fields, separators=(",", ":"))


def read_record(message: Mapping[str, Any]) -> DeadLetterRecord | None:
    """Read the record of a message in a dead-letter queue.

    Args:
        message: as ReceiveMessage returned it. The request must have asked for all attributes and
            system attributes.

    Returns:
        The record, or ``None`` if the attribute is missing or unreadable, or if SQS itself moved
        the message (it then has ``DeadLetterQueueSourceArn``). On a message that SQS moved, only
        its sender can have written the attribute. A sender to the dead-letter queue itself can
        still forge a record. Only the queue's access policy prevents that.

        Fields that are missing or of the wrong type are ``None``, empty or 0. Counts are never
        negative, times are finite, and texts are as short as a worker writes them.
    """
    if (message.get("Attributes") or {}).get("DeadLetterQueueSourceArn"):
        return None
    attribute = (message.get("MessageAttributes") or {}).get(ATTRIBUTE_NAME) or {}
    found = read_json_object(attribute.get("StringValue"))
    if found is None:
        return None
    texts: dict[str, Any] = {name: _cut(name, found.get(name)) for name in _TEXTS}
    texts |= {name: texts[name] or "" for name in ("reason", "origin", "worker")}
    return DeadLetterRecord(
        **texts,
        attempts=_count(found.get("attempts")),
        first_received_at=_time(found.get("first_received_at")),
        failed_at=_time(found.get("failed_at")) or 0.0,
        due_at=_time(found.get("due_at")),
        version=_count(found.get("version")),
    )


def replay_of(message: Mapping[str, Any]) -> str | None:
    """Return the ``traceparent`` of the failed run from the mark of a replay.

    Return ``None`` if the message is not a replay, or if its mark has no ``traceparent``.

    Args:
        message: as ReceiveMessage returned it.
    """
    mark = ((message.get("MessageAttributes") or {}).get(REPLAY_ATTRIBUTE) or {}).get("StringValue")
    is_ours = isinstance(mark, str) and len(mark) <= _MAX_MARK_CHARACTERS
    trace = (read_json_object(mark) or {}).get("trace") if is_ours else None
    return trace if isinstance(trace, str) else None


def with_record(
    body: str, attributes: Mapping[str, Mapping[str, Any]], record: DeadLetterRecord
) -> dict[str, dict[str, Any]]:
    """Return the attributes of a dead letter, with the record among them.

    Args:
        body: the message's body. Only its size matters.
        attributes: ``MessageAttributes`` as ReceiveMessage returned them. An attribute with the
            record's name is dropped. It must be forged by a sender, because workers add a record
            only to dead letters.
        record: the record to add. Its texts are cut to the lengths listed in :func:`read_record`.

    SQS takes at most ten attributes, and at most 1 MiB for the body and the attributes together.
    Texts that do not fit are left out of the record, first the traceback, then also the exception's
    message. If the record still does not fit, or the message already has ten other attributes, the
    attributes are returned without the record.
    """
    own = {name: sendable(value) for name, value in attributes.items() if name != ATTRIBUTE_NAME}
    room = MAX_MESSAGE_BYTES - message_bytes(body, own)
    texts: dict[str, Any] = {name: _cut(name, getattr(record, name)) for name in _TEXTS}
    for dropped in ((), ("traceback",), ("traceback", "exception_message")):
        text = replace(record, **{**texts, **dict.fromkeys(dropped)}).to_json()
        attribute = {ATTRIBUTE_NAME: {"DataType": "String", "StringValue": text}}
        if len(own) < MAX_MESSAGE_ATTRIBUTES and _size(attribute) <= room:
            return {**own, **attribute}
    return own  # A dead letter without its reason is better than a lost message.


def message_bytes(body: str, attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of a message in bytes, as SQS counts it against its limit of 1 MiB."""
    return len(body.encode()) + _size(attributes)


def entry_bytes(entry: Mapping[str, Any]) -> int:
    """Return the size of an entry of SendMessageBatch in bytes, as SQS counts it."""
    return message_bytes(entry["MessageBody"], entry.get("MessageAttributes", {}))


def batches(
    entries: Iterable[tuple[_Key, dict[str, Any]]], *, size: int = MAX_BATCH_ENTRIES
) -> Iterator[list[tuple[_Key, dict[str, Any]]]]:
    """Divide keyed entries into batches of at most ``size`` entries (never over ten) and 1 MiB."""
    batch: list[tuple[_Key, dict[str, Any]]] = []
    total = 0
    for key, entry in entries:
        length = entry_bytes(entry)
        is_full = len(batch) >= min(size, MAX_BATCH_ENTRIES)
        if batch and (is_full or total + length > MAX_MESSAGE_BYTES):
            yield batch
            batch, total = [], 0
        batch.append((key, entry))
        total += length
    if batch:
        yield batch


def _cut(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return None
    limit = _MAX_CHARACTERS.get(name, _MAX_NAME_CHARACTERS)
    # Keep the end of a traceback, because the error is there.
    cut = value[-limit:] if name == "traceback" else value[:limit]
    return cut.encode(errors="replace").decode()  # half a surrogate pair cannot be encoded


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def with_trace(header: str | None) -> dict[str, Any]:
    """Return the part of a SendMessage entry that keeps a message's X-Ray trace header, if any."""
    if not header:
        return {}
    trace = {"DataType": "String", "StringValue": header}
    return {"MessageSystemAttributes": {"AWSTraceHeader": trace}}


def sendable(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Return an attribute without the fields that ReceiveMessage adds and SendMessage refuses."""
    return {key: attribute[key] for key in _VALUE_KEYS if attribute.get(key) is not None}


def _size(attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of names, types and values in bytes, as SQS counts it."""
    return sum(
        len(name.encode())
        + sum(len(v if isinstance(v, bytes) else v.encode()) for v in value.values())
        for name, value in attributes.items()
    )
