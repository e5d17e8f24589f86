"""What a worker knows of the SQS message behind a task: one receive of it, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .eta import deferrals

__all__ = ["Delivery"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One receive of one message. Plain values only: it is pickled to the pool process.

    Times are seconds since the epoch. Those of SQS (``first_received_at``, ``sent_at``) come from
    its clock, ``received_at`` from the worker's.
    """

    message_id: str
    queue_url: str
    received_at: float
    #: SQS's own count, this receive included. It counts receives, not runs: a prefetched message
    #: given back at a deploy has been received too.
    receive_count: int = 1
    first_received_at: float | None = None
    sent_at: float | None = None
    #: From the queue's redrive policy: SQS moves the message to the dead-letter queue on the
    #: receive *after* this many. ``None``: the queue has none, or it could not be read.
    max_receive_count: int | None = None
    #: Receives that were only to wait for the task's ETA.
    deferrals: int = 0
    #: Seconds that SQS keeps a message from ``sent_at`` on. ``None``: not known.
    retention_seconds: int | None = None

    @classmethod
    def from_sqs(
        cls,
        message: Mapping[str, Any],
        *,
        queue_url: str,
        received_at: float,
        max_receive_count: int | None = None,
        retention_seconds: int | None = None,
        eta: float | None = None,
        held_seconds: float = 0,
    ) -> Delivery:
        """Read a message as ReceiveMessage returned it; what SQS was not asked for is ``None``."""
        attributes = message.get("Attributes") or {}
        sent_at = _seconds(attributes.get("SentTimestamp"))
        return cls(
            message_id=message["MessageId"],
            queue_url=queue_url,
            received_at=received_at,
            receive_count=int(attributes.get("ApproximateReceiveCount", 1)),
            first_received_at=_seconds(attributes.get("ApproximateFirstReceiveTimestamp")),
            sent_at=sent_at,
            deferrals=deferrals(eta=eta, sent_at=sent_at, held_seconds=held_seconds),
            max_receive_count=max_receive_count,
            retention_seconds=retention_seconds,
        )

    @property
    def earlier_runs(self) -> int:
        """Runs before this one, at the most: a receive need not have led to one."""
        return max(0, self.receive_count - 1 - self.deferrals)

    @property
    def is_last_before_sqs_moves_it(self) -> bool:
        """Whether SQS would move the message, silently, at its next receive."""
        return self.max_receive_count is not None and self.receive_count >= self.max_receive_count

    @property
    def expires_at(self) -> float | None:
        """When SQS's retention period deletes the message, hidden or not."""
        if self.sent_at is None or self.retention_seconds is None:
            return None
        return self.sent_at + self.retention_seconds


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
