"""Turn changes in the settlement table into events of the worker's one stream."""

from __future__ import annotations

from collections.abc import Sequence

from ..observe.events import (
    Event,
    HeldTooLong,
    RenewalRefused,
    Settled,
    SettlementFailed,
    SettlementRefused,
)
from ..sqs import settlement
from ..sqs.errors import Failure
from ..sqs.settlement import Call, Happening, Row, State

#: The purposes of calls, as the log names them.
_VERBS = {state: state.value for state in State} | {
    State.HELD: "renew",
    State.DEAD_LETTER: "send",
}


def report(event: settlement.Event) -> Event | None:
    """Return the event for observers of a change in the table; ``None``: it has none."""
    row, queue, code = event.row, queue_name(event.row.queue.url), str(event.failure)
    message_id = row.message_id
    if event.what is Happening.LOST:
        return RenewalRefused(queue=queue, message_id=message_id, code=code)
    if event.what is Happening.TWELVE_HOURS:
        return HeldTooLong(queue=queue, message_id=message_id)
    if event.what is Happening.TOO_LATE:
        return SettlementFailed(
            queue=queue,
            message_id=message_id,
            action=_VERBS[event.purpose],
            code=None if event.failure is None else code,
        )
    if event.what is Happening.REFUSED:
        return SettlementRefused(queue=queue, action=_action(event, row), code=code)
    return None


def settled(call: Call, results: Sequence[Failure | None]) -> Settled:
    """Return the event for observers of an answered batch call."""
    failures = [failure for failure in results if failure is not None]
    return Settled(
        queue=queue_name(call.url),
        action=call.operation.value,
        failed=len(failures),
        code=failures[0].code if failures else None,
    )


def _action(event: settlement.Event, row: Row) -> str:
    if event.purpose is State.DEAD_LETTER:
        return f"send dead letters to {queue_name(row.queue.dlq_url or '')}"
    return f"{_VERBS[event.purpose]} messages"


def queue_name(url: str) -> str:
    return url.rpartition("/")[2]
