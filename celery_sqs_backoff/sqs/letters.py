"""Entries of SendMessageBatch that make dead letters of messages, in batches that SQS takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from .dead_letter import DeadLetterRecord, message_bytes, with_record
from .limits import MAX_BATCH_ENTRIES, MAX_MESSAGE_BYTES
from .settlement import Content

_Key = TypeVar("_Key")


def dead_letter_entry(
    content: Content, record: DeadLetterRecord | None, *, message_id: str, is_fifo: bool
) -> dict[str, Any]:
    """Return the message as it came, with the record on it, as an entry without ``Id``.

    Arguments:
        content: the message.
        record: why it is given up; ``None`` = leave it out.
        message_id: of the message. A FIFO queue sends a second try with the same one only once.
        is_fifo: of both queues. The message group is kept on standard queues, too: theirs are fair
            by it. https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-fair-queues.html
    """
    attributes = without_empty(content.attributes)
    if record is not None:
        attributes = with_record(content.body, content.attributes, record)
    entry: dict[str, Any] = {"MessageBody": content.body, "MessageAttributes": attributes}
    if content.group_id is not None or is_fifo:
        entry["MessageGroupId"] = content.group_id or "default"
    if content.trace_header is not None:
        trace = {"DataType": "String", "StringValue": content.trace_header}
        entry["MessageSystemAttributes"] = {"AWSTraceHeader": trace}
    if is_fifo:
        entry["MessageDeduplicationId"] = message_id
    return entry


def without_empty(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Drop what ReceiveMessage adds to attributes and SendMessage refuses."""
    wanted = ("DataType", "StringValue", "BinaryValue")
    return {
        name: {key: value[key] for key in wanted if value.get(key) is not None}
        for name, value in attributes.items()
    }


def in_batches(
    entries: Iterable[tuple[_Key, dict[str, Any]]],
) -> Iterator[list[tuple[_Key, dict[str, Any]]]]:
    """Divide keyed entries into calls: ten, and 1 MiB of all their bytes together."""
    batch: list[tuple[_Key, dict[str, Any]]] = []
    total = 0
    for key, entry in entries:
        size = message_bytes(entry["MessageBody"], entry["MessageAttributes"])
        if batch and (total + size > MAX_MESSAGE_BYTES or len(batch) == MAX_BATCH_ENTRIES):
            yield batch
            batch, total = [], 0
        batch.append((key, entry))
        total += size
    if batch:
        yield batch
