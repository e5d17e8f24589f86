"""Read a message of a dead-letter queue, and make the SendMessageBatch entry to send it again.

Any sender to the queue may have written the message, in any format. So reading it never raises.
:attr:`DlqMessage.unreadable` names a part that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..sqs.dead_letter import (
    ATTRIBUTE_NAME,
    REPLAY_ATTRIBUTE,
    DeadLetterRecord,
    entry_bytes,
    read_record,
    sendable,
    with_trace,
)
from ..sqs.envelope import Envelope, iso_time, read_envelope, with_headers
from ..sqs.limits import MAX_MESSAGE_ATTRIBUTES, MAX_MESSAGE_BYTES
from ..text import read_json_object

#: With ``expired="extend"``, a task expires at least this number of seconds after its replay.
_LEAST_LIFETIME_SECONDS = 3600

#: SQS keeps no message longer than 14 days.
_LONGEST_RETENTION_SECONDS = 1_209_600

#: Message attribute of a message that a restore put back. Its value is the ID that the message has
#: in the archive.
RESTORED_ATTRIBUTE = "celery-sqs-backoff-restored"

_OUTCOMES = {"RETRYABLE", "NOT_PROCESSED", "UNKNOWN"}


class DlqMessage:
    """A dead letter, as one receive returned it.

    Arguments:
        message: as ReceiveMessage returned it, with all attributes.

    Attributes:
        unreadable: name of the part that cannot be read; ``None`` = all parts can be read.
        sent_at: when SQS began to count the retention period, in seconds since the epoch. If SQS
            moved the message to this queue, this is when the message was first sent (on a FIFO
            queue, when SQS moved it). If a worker sent the message to this queue, this is when the
            worker did so. ``None`` = SQS did not say.
        record: what a worker wrote about the failure; ``None`` = there is no valid record, or SQS
            itself moved the message, so that no worker wrote a record.
        source_arn: the queue that SQS itself moved the message from; ``None`` = SQS did not move
            it.
        replays: how many times the message was replayed.
        run_id: ID of the redrive that replayed it last; ``None`` = never replayed.
        attributes: its message attributes, as SendMessage takes them, without the dead-letter
            record and the mark of a restore.
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
        except Exception:  # noqa: BLE001  # a bad message must not end the run
            self.unreadable = "its format"
        if not self.body:
            self.unreadable = "its body"

    def __repr__(self) -> str:
        return f"<DlqMessage {self.id}>"

    def _read(self) -> None:
        system: Mapping[str, str] = self.message.get("Attributes") or {}
        self.group_id = system.get("MessageGroupId")
        self.source_arn = system.get("DeadLetterQueueSourceArn")
        self.trace = system.get("AWSTraceHeader")
        if (milliseconds := system.get("SentTimestamp")) is not None:
            self.sent_at = int(milliseconds) / 1000
        self.envelope = read_envelope(self.body)
        self.record = read_record(self.message)
        # Leave out the dead-letter record. It is about the failure before the replay, and would be
        # wrong for a later failure.
        self.attributes = {
            name: sendable(value)
            for name, value in (self.message.get("MessageAttributes") or {}).items()
            if name not in (ATTRIBUTE_NAME, RESTORED_ATTRIBUTE)
        }
        text = self.attributes.get(REPLAY_ATTRIBUTE, {}).get("StringValue")
        mark = read_json_object(text) or {}
        if type(replays := mark.get("replays")) is int:
            self.replays = max(0, replays)
        if isinstance(run_id := mark.get("run"), str):
            self.run_id = run_id

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
        """Queue that the message came from, according to SQS, or else to its record.

        A sender to the dead-letter queue can forge the record.
        """
        return self.source_arn or self._from_record("origin")

    @property
    def error(self) -> str | None:
        """Type and message of the exception, as one text."""
        kind, text = self._from_record("exception_type"), self._from_record("exception_message")
        return f"{kind or ''}: {text or ''}" if kind or text else None

    @property
    def restored_id(self) -> str | None:
        """ID that the message has in the archive. ``None`` if no restore put the message back."""
        attributes: Mapping[str, Any] = self.message.get("MessageAttributes") or {}
        found: str | None = (attributes.get(RESTORED_ATTRIBUTE) or {}).get("StringValue")
        return found

    def _from_record(self, name: str) -> str | None:
        found: str | None = getattr(self.record, name, None)
        return found or None

    @property
    def first_sent_at(self) -> float | None:
        """Time when the message was first sent, in seconds since the epoch. ``None`` = unknown.

        If a worker sent the message to this queue, its dead-letter record says when a worker first
        received it. This can be days before ``sent_at``. A time more than 14 days before
        ``sent_at`` is forged, because SQS keeps no message that long. The result is then
        ``sent_at`` minus 14 days.
        """
        if self.sent_at is None:
            return None
        received_at: float | None = getattr(self.record, "first_received_at", None)
        if received_at is None:
            return self.sent_at
        return min(self.sent_at, max(received_at, self.sent_at - _LONGEST_RETENTION_SECONDS))

    def is_expired(self, now: float) -> bool:
        """Return whether a worker would discard the task, because the time ``expires`` is past."""
        expires = self.envelope.expires if self.envelope else None
        return expires is not None and expires <= now

    def due_in(self, now: float) -> float:
        """Return the rest of the message's retry delay in seconds, or 0 if the delay is over.

        Only the record of a *parked* message has a delay. A worker moved such a message to the
        dead-letter queue instead of hiding it, because too many messages were hidden.
        """
        due_at = self.record.due_at if self.record else None
        return 0.0 if due_at is None else max(0.0, due_at - now)

    def entry(self, *, run_id: str, now: float, extend: bool = False) -> dict[str, Any]:
        """Return the entry for SendMessageBatch, without ``Id`` and the destination's fields.

        The entry has a *replay mark*, a message attribute with the number of replays and the ID of
        the run. The mark is left out if it does not fit into SQS's limits.

        Arguments:
            run_id: ID of the run.
            now: seconds since the epoch.
            extend: let an expired task expire later. The task gets as much time from ``now`` as it
                had after its first send, and at least an hour.
        """
        entry: dict[str, Any] = {"MessageBody": self.body, **with_trace(self.trace)}
        if extend and self.is_expired(now) and self.envelope:
            expires = iso_time(now + self._lifetime())
            entry["MessageBody"] = with_headers(self.body, expires=expires)
        facts: dict[str, object] = {"replays": self.replays + 1, "run": run_id}
        if (trace := self._from_record("trace")) is not None:
            facts["trace"] = trace  # so that the replay's span links to the failed run's span
        attributes = {name: v for name, v in self.attributes.items() if name != REPLAY_ATTRIBUTE}
        mark = json.dumps(facts, separators=(",", ":"))
        return with_mark(entry, attributes, REPLAY_ATTRIBUTE, mark)

    def _lifetime(self) -> float:
        assert self.envelope is not None
        expires = self.envelope.expires or 0.0
        first = expires - (self.first_sent_at or expires)
        return max(_LEAST_LIFETIME_SECONDS, first)


def with_mark(
    entry: dict[str, Any], attributes: dict[str, dict[str, Any]], name: str, mark: str
) -> dict[str, Any]:
    """Return an entry with the message's attributes and, if SQS's limits leave room, a mark.

    Arguments:
        entry: an entry for SendMessageBatch, without attributes.
        name, mark: name and value of the attribute that is the mark.
    """
    plain = entry | ({"MessageAttributes": attributes} if attributes else {})
    marks = {name: {"DataType": "String", "StringValue": mark}}
    marked = entry | {"MessageAttributes": attributes | marks}
    has_room = len(attributes) < MAX_MESSAGE_ATTRIBUTES and entry_bytes(marked) <= MAX_MESSAGE_BYTES
    return marked if has_room else plain
