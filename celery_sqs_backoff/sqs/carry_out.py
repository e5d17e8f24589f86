"""Carries out the calls of a settlement table through the port, with a result for every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calls import Calls
from .errors import Failure, Kind, Operation
from .letters import dead_letter_entry, in_batches
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
    sendable = []
    for position, entry in enumerate(entries):
        try:
            sendable.append((position, _dead_letter(entry)))
        except Exception as exc:  # noqa: BLE001  # a record or attributes that nobody thought of
            results[position] = Failure(Kind.BAD_ENTRY, type(exc).__name__)
    dlq_url = entries[0].row.queue.dlq_url
    for batch in in_batches(sendable):
        if dlq_url is None:
            failures: list[Failure | None] = [Failure(Kind.NO_QUEUE, "NoDeadLetterQueue")] * len(
                batch
            )
        else:
            failures = [sent.failure for sent in port.on(dlq_url).send([e for _, e in batch])]
        results.update(zip((position for position, _ in batch), failures, strict=True))
    return [results[position] for position in range(len(entries))]


def _dead_letter(entry: Entry) -> dict[str, Any]:
    row = entry.row
    assert row.content is not None
    return dead_letter_entry(
        row.content,
        None if row.without_record else row.record,
        message_id=row.message_id,
        is_fifo=row.queue.is_fifo,
    )
