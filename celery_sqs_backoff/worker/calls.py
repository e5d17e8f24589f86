"""The batch calls by which leases are renewed and settled, and what SQS answered for each lease.

None of them raises for an error of SQS or of the network: that is an answer for every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ..classifiers.botocore import botocore_errors
from ..deadletter import message_bytes, with_record
from ..limits import MAX_MESSAGE_BYTES
from ..outcomes import Outcome, judge
from ..queues import error_code
from .lease import Lease

__all__ = ["LostAnswer", "Results", "change_visibility", "delete", "send_to_dead_letter_queue"]

#: Each lease of a batch with its error code; ``None`` where SQS agreed.
Results = list[tuple[Lease, str | None]]

_CLASSIFY = botocore_errors()


class LostAnswer(str):
    """The error code of a call that SQS may have carried out all the same."""

    __slots__ = ()


def delete(batch: Sequence[Lease]) -> Results:
    """Delete up to ten messages of one queue."""
    entries = [{"ReceiptHandle": lease.receipt_handle} for lease in batch]
    return _call(batch[0].client.delete_message_batch, batch[0].queue.url, batch, entries)


def change_visibility(changes: Sequence[tuple[Lease, str, int]]) -> Results:
    """Hide up to ten messages of one queue: lease, receipt handle, seconds (0 = show it now)."""
    batch = [lease for lease, _, _ in changes]
    entries = [
        {"ReceiptHandle": handle, "VisibilityTimeout": seconds} for _, handle, seconds in changes
    ]
    client = batch[0].client
    return _call(client.change_message_visibility_batch, batch[0].queue.url, batch, entries)


def send_to_dead_letter_queue(batch: Sequence[Lease]) -> Results:
    """Send up to ten messages of one queue to its dead-letter queue, each with its record.

    In one call, unless they are more than SQS takes at once.
    """
    client, dlq_url = batch[0].client, batch[0].queue.dlq_url
    assert dlq_url is not None
    results: Results = []
    for leases, entries in _that_fit(batch):
        results += _call(client.send_message_batch, dlq_url, leases, entries)
    return results


def _call(
    operation: Callable[..., Any],
    queue_url: str,
    batch: Sequence[Lease],
    entries: Iterable[Mapping[str, Any]],
) -> Results:
    """Entries are told apart by their position: one batch can hold two receives of a message."""
    numbered = [{"Id": str(i), **entry} for i, entry in enumerate(entries)]
    try:
        answer = operation(QueueUrl=queue_url, Entries=numbered)
    except (ClientError, BotoCoreError) as exc:
        code = error_code(exc)
        if judge(exc, classify=[_CLASSIFY]).outcome is Outcome.UNKNOWN:
            code = LostAnswer(code)
        return [(lease, code) for lease in batch]
    failed = {f["Id"]: f["Code"].rpartition(".")[2] for f in answer.get("Failed", ())}
    return [(lease, failed.get(str(i))) for i, lease in enumerate(batch)]


def _that_fit(batch: Sequence[Lease]) -> Iterator[tuple[list[Lease], list[dict[str, Any]]]]:
    """Divide a batch: SQS counts the bytes of all entries of a call together."""
    leases: list[Lease] = []
    entries: list[dict[str, Any]] = []
    total = 0
    for lease in batch:
        entry = _dead_letter(lease)
        size = message_bytes(entry["MessageBody"], entry["MessageAttributes"])
        if entries and total + size > MAX_MESSAGE_BYTES:
            yield leases, entries
            leases, entries, total = [], [], 0
        leases.append(lease)
        entries.append(entry)
        total += size
    yield leases, entries


def _dead_letter(lease: Lease) -> dict[str, Any]:
    """The message as it came, and the record."""
    assert lease.record is not None
    entry: dict[str, Any] = {
        "MessageBody": lease.body,
        "MessageAttributes": with_record(lease.body, lease.attributes, lease.record),
    }
    if lease.queue.is_fifo:
        entry["MessageGroupId"] = lease.group_id or "default"
        entry["MessageDeduplicationId"] = lease.delivery.message_id
    return entry
