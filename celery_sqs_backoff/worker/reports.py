"""From what has happened in the settlement table to the worker's one stream of events."""

from __future__ import annotations

from collections.abc import Sequence

from ..observe.events import (
    CountRefused,
    Event,
    HeldTooLong,
    Parked,
    RenewalRefused,
    Settled,
    SettlementFailed,
    SettlementRefused,
)
from ..sqs import settlement
from ..sqs.errors import Failure
from ..sqs.settlement import Call, Happening, Purpose, Row


def report(event: settlement.Event) -> Event | None:
    """Return what observers are told of an event of the table; ``None``: nothing."""
    queue, code = queue_name(event.url), str(event.failure)
    if event.what is Happening.LOOKED:
        return CountRefused(queue=queue, code=code) if event.failure is not None else None
    return None if event.row is None else _of_row(event, event.row, queue, code)


def settled(call: Call, results: Sequence[Failure | None]) -> Settled:
    """Return what observers are told of the answer to a batch call."""
    failures = [failure for failure in results if failure is not None]
    return Settled(
        queue=queue_name(call.url),
        operation=call.operation.value,
        entries=len(results),
        failed=len(failures),
        code=failures[0].code if failures else None,
        renewals=sum(entry.purpose is Purpose.RENEW for entry in call.entries),
    )


def _of_row(event: settlement.Event, row: Row, queue: str, code: str) -> Event | None:
    message_id = row.message_id
    if event.what is Happening.LOST:
        return RenewalRefused(queue=queue, message_id=message_id, code=code)
    if event.what is Happening.TWELVE_HOURS:
        return HeldTooLong(queue=queue, message_id=message_id)
    if event.what is Happening.TOO_LATE:
        return SettlementFailed(
            queue=queue,
            message_id=message_id,
            action=event.purpose.value if event.purpose else "settle",
            code=None if event.failure is None else code,
        )
    if event.what is Happening.REFUSED:
        return SettlementRefused(queue=queue, action=_action(event, row), code=code)
    if event.what is Happening.PARKED and row.record is not None:
        task, task_id = row.record.task or "", row.record.id or ""
        return Parked(queue=queue, task=task, task_id=task_id, message_id=message_id)
    return None


def _action(event: settlement.Event, row: Row) -> str:
    if event.purpose is Purpose.SEND:
        return f"send dead letters to {queue_name(row.queue.dlq_url or '')}"
    return f"{event.purpose.value} messages" if event.purpose else "settle messages"


def queue_name(url: str) -> str:
    return url.rpartition("/")[2]
