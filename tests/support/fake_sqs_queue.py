"""A queue of the fake SQS: its messages, and until when each is hidden.

Time is that of the clock, and no call waits. If AWS leaves open what happens, this queue takes the
case that is worse for its user.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 1_048_576
MAX_IN_FLIGHT = 120_000
TWELVE_HOURS = 43_200
DEDUPLICATION_SECONDS = 300

#: Characters that a body must not have. The API reference of SendMessage allows those of XML 1.0.
_REFUSED_CHARACTERS = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_RANGES = {
    "DelaySeconds": (0, 900, 0),
    "MessageRetentionPeriod": (60, 1_209_600, 345_600),
    "VisibilityTimeout": (0, TWELVE_HOURS, 30),
    "MaximumMessageSize": (1_024, MAX_BYTES, MAX_BYTES),
}


class Refused(Exception):
    """A refusal of SQS, with an error code and a reason for people to read."""

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True, eq=False)
class Receipt:
    handle: str
    message: Message
    received_at: float


@dataclass(eq=False)
class Message:
    """A message on its queue.

    ``visible_at`` is the end of its delay or of its visibility timeout.
    """

    id: str
    body: str
    attributes: dict[str, dict[str, Any]]
    sequence: int
    sent_at: float
    visible_at: float
    group_id: str | None = None
    deduplication_id: str | None = None
    trace_header: str | None = None
    receives: int = 0
    first_received_at: float | None = None
    source_arn: str | None = None
    #: The message's last receive on this queue.
    receipt: Receipt | None = None

    def is_in_flight(self, now: float) -> bool:
        return self.receipt is not None and now < self.visible_at


@dataclass(eq=False)
class Queue:
    """A queue with its messages and rules.

    Arguments:
        attributes: the attributes that CreateQueue takes.
        clock: returns the time in seconds since the epoch.
        find: returns the queue that has an ARN, for the redrive policy.
        max_in_flight: how many messages may be in flight. A test can reach a small number sooner.
    """

    url: str
    attributes: Mapping[str, str]
    clock: Callable[[], float]
    find: Callable[[str], Queue]
    max_in_flight: int = MAX_IN_FLIGHT
    #: Whether a delete with an old receipt handle works. AWS says that it might not.
    stale_handles_delete: bool = True
    messages: list[Message] = field(default_factory=list)
    #: Called when a message has left the queue, with the way it left: "deleted", "moved" to the
    #: dead-letter queue, or "expired".
    on_gone: Callable[[str, Message], None] = lambda how, message: None

    def __post_init__(self) -> None:
        self._receipts: dict[str, Receipt] = {}
        self._sent: dict[str, tuple[Message, float]] = {}  # by deduplication id
        self._count = itertools.count(1)
        self.set_attributes(self.attributes)

    def set_attributes(self, attributes: Mapping[str, str]) -> None:
        """Change attributes, as SetQueueAttributes does."""
        self.attributes = {**self.attributes, **attributes}
        for name, (low, high, _) in _RANGES.items():
            if not low <= self._setting(name) <= high:
                raise Refused("InvalidAttributeValue", f"{name}: {low} to {high}")
        if self.is_fifo != (self.attributes.get("FifoQueue") == "true"):
            raise Refused("InvalidParameterValue", "a FIFO queue's name ends with .fifo")
        self.dlq: Queue | None = None
        if policy := json.loads(self.attributes.get("RedrivePolicy") or "{}"):
            self.max_receive_count = int(policy["maxReceiveCount"])
            self.dlq = self.find(policy["deadLetterTargetArn"])
            if not 1 <= self.max_receive_count <= 1_000 or self.dlq.is_fifo != self.is_fifo:
                raise Refused("InvalidParameterValue", "redrive policy")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def arn(self) -> str:
        return f"arn:aws:sqs:us-east-1:1:{self.name}"

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    def _setting(self, name: str) -> int:
        return int(self.attributes.get(name, _RANGES[name][2]))

    def in_flight(self) -> list[Message]:
        now = self._expire()
        return [message for message in self.messages if message.is_in_flight(now)]

    def counts(self) -> dict[str, int]:
        now, in_flight = self.clock(), len(self.in_flight())
        delayed = sum(m.receipt is None and now < m.visible_at for m in self.messages)
        return {
            "ApproximateNumberOfMessages": len(self.messages) - in_flight - delayed,
            "ApproximateNumberOfMessagesNotVisible": in_flight,
            "ApproximateNumberOfMessagesDelayed": delayed,
        }

    # Sending

    def send(
        self,
        body: str,
        attributes: Mapping[str, dict[str, Any]],
        *,
        delay: int | None = None,
        group_id: str | None = None,
        deduplication_id: str | None = None,
        trace_header: str | None = None,
    ) -> Message:
        now = self._expire()
        self._check(body, attributes)
        if delay is not None and not 0 <= delay <= 900:
            raise Refused("InvalidParameterValue", "DelaySeconds: 0 to 900")
        if self.is_fifo:
            if delay:
                raise Refused("InvalidParameterValue", "DelaySeconds on a FIFO queue")
            delay = None
            if not group_id:
                raise Refused("MissingParameter", "MessageGroupId")
            deduplication_id = deduplication_id or self._by_content(body)
            earlier, until = self._sent.get(deduplication_id, (None, 0.0))
            if earlier is not None and now < until:
                return earlier
        sequence = next(self._count)
        message = Message(
            id=f"{self.name}-{sequence}",
            body=body,
            attributes={name: dict(value) for name, value in attributes.items()},
            sequence=sequence,
            sent_at=now,
            visible_at=now + (self._setting("DelaySeconds") if delay is None else delay),
            group_id=group_id,
            deduplication_id=deduplication_id,
            trace_header=trace_header,
        )
        if deduplication_id is not None:
            self._sent[deduplication_id] = message, now + DEDUPLICATION_SECONDS
        self.messages.append(message)
        return message

    def _by_content(self, body: str) -> str:
        if self.attributes.get("ContentBasedDeduplication") != "true":
            raise Refused("InvalidParameterValue", "no MessageDeduplicationId")
        return hashlib.sha256(body.encode()).hexdigest()

    def _check(self, body: str, attributes: Mapping[str, dict[str, Any]]) -> None:
        if not body:
            raise Refused("MissingParameter", "MessageBody")
        if _REFUSED_CHARACTERS.search(body):
            raise Refused("InvalidMessageContents")
        if len(attributes) > 10:
            raise Refused("InvalidParameterValue", "more than 10 message attributes")
        for name, value in attributes.items():
            kind = "BinaryValue" if value["DataType"].startswith("Binary") else "StringValue"
            if set(value) != {"DataType", kind} or not value[kind]:
                raise Refused("InvalidParameterValue", f"message attribute {name}")
        if message_bytes(body, attributes) > self._setting("MaximumMessageSize"):
            raise Refused("InvalidParameterValue", "message too long")

    # Receiving

    def receive(
        self, limit: int, *, visibility_timeout: int | None, waits: bool
    ) -> list[tuple[str, Message]]:
        now = self._expire()
        room = self.max_in_flight - len(self.in_flight())
        if room <= 0 and not waits and not self.is_fifo:
            raise Refused("OverLimit")
        window = self._setting("VisibilityTimeout")
        if visibility_timeout is not None:
            window = visibility_timeout
        received: list[tuple[str, Message]] = []
        for message in list(self._available(now)):
            if len(received) >= min(limit, room):
                break
            if self.dlq is not None and message.receives >= self.max_receive_count:
                self._move(message, self.dlq, now)
                continue
            message.receives += 1
            message.first_received_at = message.first_received_at or now
            message.visible_at = now + window
            handle = f"{message.id}#{message.receives}#{self.name}"
            self._receipts[handle] = message.receipt = Receipt(handle, message, now)
            received.append((handle, message))
        return received

    def _available(self, now: float) -> Iterator[Message]:
        """Yield visible messages in the order of sending.

        On a FIFO queue, a hidden message holds up its group.
        """
        blocked: set[str | None] = set()
        for message in self.messages:
            if message.visible_at > now:
                blocked.add(message.group_id)
            elif not (self.is_fifo and message.group_id in blocked):
                yield message

    def _move(self, message: Message, dlq: Queue, now: float) -> None:
        """Move a message to the dead-letter queue.

        On a standard queue, the message keeps its age.
        """
        self._remove(message, "moved")
        message.source_arn, message.receipt, message.visible_at = self.arn, None, now
        message.sequence = next(dlq._count)
        if self.is_fifo:
            message.sent_at, message.deduplication_id = now, message.id
        dlq.messages.append(message)

    # Deletes and changes of visibility

    def delete(self, handle: str) -> None:
        now, receipt = self._expire(), self._receipt(handle)
        message = receipt.message
        if message not in self.messages:
            return
        if self._is_void(receipt, now) or now - receipt.received_at > TWELVE_HOURS:
            raise Refused("InvalidParameterValue", "The receipt handle has expired.")
        if message.receipt is receipt or self.stale_handles_delete:
            self._remove(message, "deleted")

    def change_visibility(self, handle: str, seconds: int) -> bool:
        """Return whether the call had an effect. SQS's response is the same without an effect."""
        now, receipt = self._expire(), self._receipt(handle)
        if not 0 <= seconds <= TWELVE_HOURS:
            raise Refused("InvalidParameterValue", "VisibilityTimeout: 0 to 43200")
        if receipt.message not in self.messages:
            raise Refused("InvalidParameterValue", "Message does not exist or is not available")
        if self._is_void(receipt, now):
            raise Refused("InvalidParameterValue", "The receipt handle has expired.")
        if not receipt.message.is_in_flight(now):
            return False
        if now - receipt.received_at + seconds > TWELVE_HOURS:
            raise Refused("InvalidParameterValue", "Total VisibilityTimeout is beyond the limit")
        receipt.message.visible_at = now + seconds
        return True

    def _is_void(self, receipt: Receipt, now: float) -> bool:
        """Return whether a receipt handle is no longer valid.

        On a FIFO queue, a handle is valid until the visibility timeout ends, or until another
        receive returns the message. On a standard queue, a handle stays valid.
        """
        message = receipt.message
        return self.is_fifo and (message.receipt is not receipt or now >= message.visible_at)

    def message_of(self, handle: str) -> Message:
        return self._receipt(handle).message

    def _receipt(self, handle: str) -> Receipt:
        try:
            return self._receipts[handle]
        except KeyError:
            raise Refused("ReceiptHandleIsInvalid") from None

    def _expire(self) -> float:
        """Drop messages at the end of their retention period, even if hidden. Return the time."""
        now, oldest = self.clock(), self.clock() - self._setting("MessageRetentionPeriod")
        for message in [m for m in self.messages if m.sent_at <= oldest]:
            self._remove(message, "expired")
        return now

    def _remove(self, message: Message, how: str) -> None:
        self.messages.remove(message)
        self.on_gone(how, message)


def message_bytes(body: str, attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of the body, and of each attribute's name, type and value, as SQS does."""
    texts: list[str | bytes] = [body]
    for name, value in attributes.items():
        texts += [name, *value.values()]
    return sum(len(text.encode() if isinstance(text, str) else text) for text in texts)


def system_attributes(message: Message, wanted: Collection[str]) -> dict[str, str]:
    """Return the system attributes of a received message. Times are in milliseconds."""
    facts = {
        "ApproximateReceiveCount": message.receives,
        "ApproximateFirstReceiveTimestamp": int((message.first_received_at or 0) * 1_000),
        "SentTimestamp": int(message.sent_at * 1_000),
        "MessageGroupId": message.group_id,
        "MessageDeduplicationId": message.deduplication_id,
        "SequenceNumber": message.sequence if message.deduplication_id else None,
        "DeadLetterQueueSourceArn": message.source_arn,
        "AWSTraceHeader": message.trace_header,
    }
    return {
        name: str(fact)
        for name, fact in facts.items()
        if fact is not None and ("All" in wanted or name in wanted)
    }
