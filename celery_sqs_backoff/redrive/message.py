"""Read a message of a dead-letter queue, and make the entry that sends it again.

Any sender to the queue may have written the message, so reading it never raises.
:attr:`DlqMessage.unreadable` names a part that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..sqs.dead_letter import (
    ATTRIBUTE_NAME,
    REPLAY_ATTRIBUTE,
    REPLAY_HEADER,
    DeadLetterRecord,
    entry_bytes,
    read_record,
    sendable,
    with_trace,
)
from ..sqs.envelope import Envelope, iso_time, read_envelope, with_headers
from ..sqs.limits import MAX_MESSAGE_ATTRIBUTES, MAX_MESSAGE_BYTES
from ..text import read_json_object

#: ``expired="extend"`` lets a task expire this long after the replay, or later.
_LEAST_LIFETIME_SECONDS = 3600

#: SQS keeps no message longer than 14 days.
_LONGEST_RETENTION_SECONDS = 1_209_600

#: Message attribute of a message that a restore put back. Its value is the ID in the archive.
RESTORED_ATTRIBUTE = "celery-sqs-backoff-restored"

#: A replay mark with this number of replays or more is invalid, as is a negative number.
_MAX_REPLAYS = 1_000_000

_OUTCOMES = {"RETRYABLE", "NOT_PROCESSED", "UNKNOWN"}


class _Unreadable(Exception):
    """A field holds a value that SQS and this package never write."""


class DlqMessage:
    """A dead letter, as one receive returned it.

    Arguments:
        message: as ReceiveMessage returned it, with all attributes.

    Attributes:
        unreadable: its unreadable part, as a constant text; ``None`` = all of it can be read.
        sent_at: when SQS began to count the retention period, in seconds since the epoch. If SQS
            moved the message here, this is when the message was first sent to its own queue. If a
            worker sent it here, this is when the worker did so. ``None`` = SQS did not say.
        source_arn: the queue that SQS itself moved the message from; ``None`` = SQS did not move
            it. If SQS moved it, a dead-letter record on it is ignored, because no worker wrote it
            for this move.
        replays: how many times the message was replayed.
        run_id: the redrive that replayed it last; ``None`` = never replayed.
    """

    unreadable: str | None = None
    envelope: Envelope | None = None
    record: DeadLetterRecord | None = None
    replays = 0
    run_id: str | None = None
    sent_at: float | None = None
    group_id: str | None = None
    source_arn: str | None = None
    trace: str | None = None

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.id: str = message["MessageId"]
        self.handle: str = message.get("ReceiptHandle", "")
        self.body: str = message.get("Body") or ""
        self.attributes: dict[str, dict[str, Any]] = {}
        try:
            self._read()
        except _Unreadable as exc:
            self.unreadable = str(exc)
        except Exception:  # noqa: BLE001  # any sender may have written it; it must not end the run
            self.unreadable = "its format"
        if not self.body:
            self.unreadable = "its body"

    def __repr__(self) -> str:
        return f"<DlqMessage {self.id}>"

    def _read(self) -> None:
        system: Mapping[str, str] = self.message.get("Attributes") or {}
        if not all(isinstance(value, str) for value in system.values()):  # an edited archive
            raise _Unreadable("its attributes")
        self.group_id = system.get("MessageGroupId")
        self.source_arn = system.get("DeadLetterQueueSourceArn")
        self.trace = system.get("AWSTraceHeader")
        if (milliseconds := system.get("SentTimestamp")) is not None:
            self.sent_at = int(milliseconds) / 1000
        self.envelope = read_envelope(self.body)
        self.record = read_record(self.message)
        self.attributes = _pick_attributes(self.message.get("MessageAttributes") or {})
        mark: object = (self.attributes.get(REPLAY_ATTRIBUTE) or {}).get("StringValue")
        if mark is None and self.envelope:
            mark = self.envelope.headers.get(REPLAY_HEADER)
        if mark is not None:
            self.replays, self.run_id = _read_mark(mark)

    @property
    def task(self) -> str | None:
        return self.envelope.task if self.envelope else self._from_record("task")

    @property
    def task_id(self) -> str | None:
        return self.envelope.id if self.envelope else self._from_record("id")

    @property
    def reason(self) -> str | None:
        return self._from_record("reason")

    @property
    def outcome(self) -> str | None:
        """Outcome of the last failure, or ``None`` without a valid dead-letter record."""
        found = self._from_record("outcome")
        return found if found in _OUTCOMES else None

    @property
    def origin(self) -> str | None:
        """Queue that the message came from, as SQS or else its record says. It can be forged."""
        return self.source_arn or self._from_record("origin")

    @property
    def error(self) -> str | None:
        """Type and message of the exception, as one text."""
        kind, text = self._from_record("exception_type"), self._from_record("exception_message")
        return f"{kind or ''}: {text or ''}" if kind or text else None

    @property
    def restored_id(self) -> str | None:
        """ID of the message in the archive. ``None`` if no restore put the message back."""
        attributes: Mapping[str, Any] = self.message.get("MessageAttributes") or {}
        found: str | None = (attributes.get(RESTORED_ATTRIBUTE) or {}).get("StringValue")
        return found

    def _from_record(self, name: str) -> str | None:
        found: str | None = getattr(self.record, name, None)
        return found or None

    @property
    def first_sent_at(self) -> float | None:
        """Time when the message was first sent, in seconds since the epoch. ``None`` = unknown.

        If a worker sent the message here, its record says when a worker first received it, which
        can be days before. A time more than 14 days before ``sent_at`` is forged, because SQS keeps
        no message that long. It is replaced by 14 days before.
        """
        if self.sent_at is None:
            return None
        received_at: float | None = getattr(self.record, "first_received_at", None)
        if received_at is None:
            return self.sent_at
        return min(self.sent_at, max(received_at, self.sent_at - _LONGEST_RETENTION_SECONDS))

    @property
    def chord(self) -> bool:
        """Whether the task is part of a chord or a group, according to Celery's own header."""
        return bool(self.envelope and self.envelope.headers.get("group"))

    def is_expired(self, now: float) -> bool:
        """Return whether a worker would discard the task because its ``expires`` is over."""
        expires = self.envelope.expires if self.envelope else None
        return expires is not None and expires <= now

    def due_in(self, now: float) -> float:
        """Return the seconds until a parked message is due. 0 for any other message."""
        due_at = self.record.due_at if self.record else None
        return 0.0 if due_at is None else max(0.0, due_at - now)

    def entry(self, *, run_id: str, now: float, extend: bool = False) -> dict[str, Any]:
        """Return the entry for SendMessageBatch, without ``Id`` and the destination's fields.

        If the replay mark made the message larger than SQS allows, the message has no mark.

        Arguments:
            run_id: is written into the replay mark, with the number of replays.
            now: seconds since the epoch.
            extend: let an expired task expire later. The task gets the same lifetime as at its
                first send, counted from ``now``, at least an hour.
        """
        headers: dict[str, object] = {}
        if extend and self.is_expired(now) and self.envelope:
            headers["expires"] = iso_time(now + self._lifetime())
        facts: dict[str, object] = {"replays": self.replays + 1, "run": run_id}
        if (trace := self._from_record("trace")) is not None:
            facts["trace"] = trace  # the replay's span links to that of the run that failed
        mark = json.dumps(facts, separators=(",", ":"))
        attributes = {name: v for name, v in self.attributes.items() if name != REPLAY_ATTRIBUTE}
        plain = self._entry(headers, attributes)
        if len(attributes) < MAX_MESSAGE_ATTRIBUTES:
            attribute = {"DataType": "String", "StringValue": mark}
            marked = self._entry(headers, {**attributes, REPLAY_ATTRIBUTE: attribute})
        elif self.envelope:
            marked = self._entry({**headers, REPLAY_HEADER: mark}, attributes)
        else:
            return plain
        return marked if entry_bytes(marked) <= MAX_MESSAGE_BYTES else plain

    def _entry(
        self, headers: Mapping[str, object], attributes: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"MessageBody": self.body}
        if headers:
            entry["MessageBody"] = with_headers(self.body, **headers)
        if attributes:
            entry["MessageAttributes"] = attributes
        return entry | with_trace(self.trace)

    def _lifetime(self) -> float:
        assert self.envelope is not None
        expires = self.envelope.expires or 0.0
        first = expires - (self.first_sent_at or expires)
        return max(_LEAST_LIFETIME_SECONDS, first)


def _read_mark(mark: object) -> tuple[int, str | None]:
    found = read_json_object(mark) or {}
    replays = found.get("replays", 0)
    if isinstance(replays, float) or (isinstance(replays, int) and not 0 <= replays < _MAX_REPLAYS):
        raise _Unreadable("its replay mark")
    run_id = found.get("run")
    return (
        replays if isinstance(replays, int) else 0,
        run_id if isinstance(run_id, str) else None,
    )


def _pick_attributes(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the message's own attributes, as SendMessage takes them.

    The dead-letter record is left out. It describes the last failure, so it would give the wrong
    reason if SQS moves the message to the dead-letter queue again.
    """
    own = (ATTRIBUTE_NAME, RESTORED_ATTRIBUTE)
    found = {n: _check_attribute(value) for n, value in attributes.items() if n not in own}
    if len(found) > MAX_MESSAGE_ATTRIBUTES:
        raise _Unreadable("its attributes")
    return found


def _check_attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    found = sendable(value)
    types = {"DataType": str, "StringValue": str, "BinaryValue": bytes}
    if (
        len(found) != 2
        or "DataType" not in found
        or not all(v and isinstance(v, types[k]) for k, v in found.items())
    ):
        raise _Unreadable("its attributes")
    return found
