"""A dead letter: a message as it lies in the source, and as it will be sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..deadletter import ATTRIBUTE_NAME, message_bytes
from ..envelope import Envelope, iso_time, read_envelope, with_headers
from ..limits import MAX_MESSAGE_ATTRIBUTES, MAX_MESSAGE_BYTES

__all__ = ["REPLAY_ATTRIBUTE", "REPLAY_HEADER", "Letter", "Replayed", "entry_bytes"]

#: The message attribute that a replay adds. It outlives the next dead-lettering, by SQS or by us,
#: both of which keep attributes that are not the dead-letter record.
REPLAY_ATTRIBUTE = "celery-sqs-backoff-replay"

#: Where it goes when the message has ten attributes of its own.
REPLAY_HEADER = "sqs_backoff_replay"

#: What an expiry is extended to, at the least.
_LEAST_LIFETIME_SECONDS = 3600


@dataclass(frozen=True)
class Replayed:
    """What earlier replays have left on a message: how many they were, and which run the last."""

    replays: int = 0
    run_id: str | None = None

    def to_json(self) -> str:
        return json.dumps({"replays": self.replays, "run": self.run_id}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: object) -> Replayed:
        try:
            found = json.loads(str(text))
            return cls(int(found["replays"]), found.get("run"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()


class Letter:
    """One receive of one dead letter.

    Arguments:
        message: as ReceiveMessage returned it, all attributes asked for.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.id: str = message["MessageId"]
        self.handle: str = message.get("ReceiptHandle", "")
        self.body: str = message["Body"]
        self._attributes: Mapping[str, Mapping[str, Any]] = message.get("MessageAttributes") or {}
        self.system: Mapping[str, str] = message.get("Attributes") or {}

    def __repr__(self) -> str:
        return f"<Letter {self.id}>"

    @property
    def sent_at(self) -> float | None:
        """When SQS got the message, seconds since the epoch (kept by a move to the DLQ)."""
        milliseconds = self.system.get("SentTimestamp")
        return None if milliseconds is None else int(milliseconds) / 1000

    @property
    def group_id(self) -> str | None:
        return self.system.get("MessageGroupId")

    @property
    def source_arn(self) -> str | None:
        """The queue that SQS itself moved the message from, if it did."""
        return self.system.get("DeadLetterQueueSourceArn")

    @cached_property
    def envelope(self) -> Envelope | None:
        return read_envelope(self.body)

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The dead-letter record; empty if SQS moved the message without our worker."""
        try:
            found = json.loads(self._attributes[ATTRIBUTE_NAME]["StringValue"])
        except (KeyError, ValueError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def attributes(self) -> dict[str, dict[str, Any]]:
        """The message's own attributes, as SendMessage takes them.

        The dead-letter record is not one of them: it tells of the life that has ended, and would
        name the wrong reason if SQS were to move the message next time. What it had to pack away
        to stay within ten attributes is back in its place.
        """
        packed = self.record.get("attributes")
        every: dict[str, Any] = {**self._attributes}
        if isinstance(packed, dict):
            every |= {
                name: found
                for name, value in packed.items()
                if (found := _unpacked(value)) is not None
            }
        return {
            name: {
                key: value[key]
                for key in ("DataType", "StringValue", "BinaryValue")
                if value.get(key) is not None
            }
            for name, value in every.items()
            if name != ATTRIBUTE_NAME
        }

    @cached_property
    def replayed(self) -> Replayed:
        if attribute := self.attributes.get(REPLAY_ATTRIBUTE):
            return Replayed.from_json(attribute.get("StringValue"))
        if self.envelope and (header := self.envelope.headers.get(REPLAY_HEADER)):
            return Replayed.from_json(header)
        return Replayed()

    @property
    def task(self) -> str | None:
        return self.envelope.task if self.envelope else _text(self.record.get("task"))

    @property
    def task_id(self) -> str | None:
        return self.envelope.id if self.envelope else _text(self.record.get("id"))

    @property
    def reason(self) -> str | None:
        return _text(self.record.get("reason"))

    @property
    def error(self) -> str | None:
        """Type and message of the exception, as one text."""
        kind, text = self.record.get("exception_type"), self.record.get("exception_message")
        return f"{kind or ''}: {text or ''}" if kind or text else None

    def is_expired(self, now: float) -> bool:
        """Whether a worker would throw the task away unrun."""
        expires = self.envelope.expires if self.envelope else None
        return expires is not None and expires <= now

    def due_in(self, now: float) -> float:
        """Seconds that a parked message still had to wait; 0 for any other."""
        due_at = self.record.get("due_at")
        return max(0.0, due_at - now) if isinstance(due_at, int | float) else 0.0

    def entry(self, *, run_id: str, now: float, extend: bool = False) -> dict[str, Any]:
        """What SendMessageBatch takes, but for ``Id`` and what depends on the destination.

        Arguments:
            run_id: goes on the message, with the number of its replays.
            now: seconds since the epoch.
            extend: give an expired task as long again as it had at first, at least an hour.
        """
        body, attributes = self.body, {**self.attributes}
        headers: dict[str, object] = {}
        if extend and self.is_expired(now) and self.envelope:
            headers["expires"] = iso_time(now + self._lifetime())
        mark = Replayed(self.replayed.replays + 1, run_id).to_json()
        if REPLAY_ATTRIBUTE in attributes or len(attributes) < MAX_MESSAGE_ATTRIBUTES:
            attributes[REPLAY_ATTRIBUTE] = {"DataType": "String", "StringValue": mark}
        elif self.envelope:
            headers[REPLAY_HEADER] = mark
        if headers:
            body = with_headers(body, **headers)
        entry: dict[str, Any] = {"MessageBody": body}
        if attributes:
            entry["MessageAttributes"] = attributes
        if trace := self.system.get("AWSTraceHeader"):
            entry["MessageSystemAttributes"] = {
                "AWSTraceHeader": {"DataType": "String", "StringValue": trace}
            }
        if headers.pop(REPLAY_HEADER, None) is None and entry_bytes(entry) > MAX_MESSAGE_BYTES:
            # A message of the full 1 MiB: better replayed uncounted than not at all.
            del attributes[REPLAY_ATTRIBUTE]
        return entry

    def _lifetime(self) -> float:
        assert self.envelope is not None
        expires = self.envelope.expires or 0.0
        first = expires - (self.sent_at or expires)
        return max(_LEAST_LIFETIME_SECONDS, first)


def entry_bytes(entry: Mapping[str, Any]) -> int:
    """Bytes of an entry as SQS counts them against the limit of a call."""
    return message_bytes(entry["MessageBody"], entry.get("MessageAttributes", {}))


def _unpacked(attribute: object) -> dict[str, Any] | None:
    """An attribute from a record; ``None`` if it is not one that we have packed."""
    try:
        value: dict[str, Any] = {**attribute}  # type: ignore[dict-item]
        if "BinaryValue" in value:
            value["BinaryValue"] = base64.b64decode(value["BinaryValue"], validate=True)
    except (TypeError, ValueError):
        return None
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
