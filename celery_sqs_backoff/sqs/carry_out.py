"""Carries out the calls of a settlement table through the port, with a result for every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calls import Calls
from .dead_letter import batches, sendable, with_record
from .errors import Failure, Kind, Operation
from .settlement import Call, Entry


def carry_out(call: Call, port: Calls) -> list[Failure | None]:
    """Make a call.

    Arguments:
        call: what the table said is due.
        port: of the queue of the call's messages.

    Returns:
        One result per entry. Nothing is raised that the port does not raise.
    """
    if call.operation is Operation.CHANGE_VISIBILITY:
        return port.change_visibility([(e.handle, e.seconds) for e in call.entries])
    if call.operation is Operation.DELETE:
        return port.delete([e.handle for e in call.entries])
    return _send(port, call.entries)


def _send(port: Calls, entries: Sequence[Entry]) -> list[Failure | None]:
    """Send dead letters, in as many calls as their bytes need."""
    results: dict[int, Failure | None] = {}
    letters = []
    for position, entry in enumerate(entries):
        try:
            letters.append((position, _dead_letter(entry)))
        except Exception as exc:  # noqa: BLE001  # a record or attributes that nobody thought of
            results[position] = Failure(Kind.BAD_ENTRY, type(exc).__name__)
    dlq_url = entries[0].row.queue.dlq_url
    for batch in batches(letters):
        if dlq_url is None:
            failures: list[Failure | None] = [Failure(Kind.NO_QUEUE, "NoDeadLetterQueue")] * len(
                batch
            )
        else:
            failures = [sent.failure for sent in port.on(dlq_url).send([e for _, e in batch])]
        results.update(zip((position for position, _ in batch), failures, strict=True))
    return [results[position] for position in range(len(entries))]


def _dead_letter(entry: Entry) -> dict[str, Any]:
    """Return a message as it came, with the record on it, as an entry without ``Id``.

    The message group is kept on standard queues too, which are fair by it.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-fair-queues.html
    A FIFO queue sends a second try with the same message ID only once.
    """
    row, content = entry.row, entry.row.content
    assert content is not None
    attributes = {name: sendable(value) for name, value in content.attributes.items()}
    if row.record is not None:
        attributes = with_record(content.body, content.attributes, row.record)
    letter: dict[str, Any] = {"MessageBody": content.body, "MessageAttributes": attributes}
    if content.group_id is not None or row.queue.is_fifo:
        letter["MessageGroupId"] = content.group_id or "default"
    if content.trace_header is not None:
        trace = {"DataType": "String", "StringValue": content.trace_header}
        letter["MessageSystemAttributes"] = {"AWSTraceHeader": trace}
    if row.queue.is_fifo:
        letter["MessageDeduplicationId"] = row.message_id
    return letter
