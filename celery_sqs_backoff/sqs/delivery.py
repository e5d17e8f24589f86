"""The facts of one receive of a task's message, and how long SQS may hide the message."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

from ..retry.budget import Standing
from .dead_letter import replay_of
from .limits import MAX_DELAY_SECONDS, MAX_VISIBILITY_TIMEOUT_SECONDS, MAX_WAIT_TIME_SECONDS

#: SQS can hide a message until 12 hours after the *request* that received it. The worker counts
#: from the response, so it stays this many seconds below 12 hours. SQS may take
#: MAX_WAIT_TIME_SECONDS to respond to a long poll. The other 40 seconds allow for differences
#: between clocks and for slow calls.
TWELVE_HOURS_MARGIN_SECONDS: Final = MAX_WAIT_TIME_SECONDS + 40

#: At the end of the retention period, SQS deletes a message even if it is hidden. So a hidden
#: message must come back this many seconds before the end.
_RETENTION_MARGIN_SECONDS: Final = 300

#: A message that waits for its ETA is hidden for at most this long after each receive. The minute
#: below SQS's 12 hours allows for differences between clocks and for slow calls.
_HOP_SECONDS: Final = MAX_VISIBILITY_TIMEOUT_SECONDS - 60


@dataclass(frozen=True, slots=True)
class Delivery:
    """One receive of one message. It has plain values only, because it is pickled for the pool.

    Times are seconds since the epoch. ``first_received_at`` and ``sent_at`` come from the clock of
    SQS, ``received_at`` from the clock of the worker.
    """

    message_id: str
    queue_url: str
    received_at: float
    #: SQS's own count of receives, including this receive. Not every receive leads to a run. For
    #: example, a worker prefetched the message and gave it back at a deploy.
    receive_count: int = 1
    #: How often this worker has received the message again while this run goes on. These receives
    #: start no other run.
    receives_since: int = 0
    first_received_at: float | None = None
    sent_at: float | None = None
    #: From the queue's redrive policy. At the receive *after* this many receives, SQS moves the
    #: message to the dead-letter queue instead of delivering it. ``None``: the queue has no policy,
    #: or the policy could not be read.
    max_receive_count: int | None = None
    #: The number of receives that are known to have led to no run. For example, the message waited
    #: for its ETA, or for its provider (the service that the task calls) to recover.
    deferrals: int = 0
    #: The time at which the task could have run if its provider had been up. ``None``: this worker
    #: has never had to hide the message for its provider.
    due_since: float | None = None
    #: SQS deletes the message this many seconds after ``sent_at``. ``None``: not known.
    retention_seconds: int | None = None
    #: The worker's directory of files that mark lost messages. A message is lost if another worker
    #: may have received it. ``None``: no such directory.
    lost_flags: str | None = None
    #: Celery's name of the queue. With ``queue_name_prefix``, the name on SQS is longer.
    queue: str | None = None
    #: The task's ETA. ``None``: the task was due when it was sent.
    due_at: float | None = None
    #: The ``traceparent`` of the failed run, if this message is a replay of a dead letter.
    replay_of: str | None = None

    @property
    def lost_flag(self) -> str | None:
        """The path of a file that exists once the worker has lost the message."""
        if self.lost_flags is None:
            return None
        return os.path.join(self.lost_flags, f"{self.message_id}-{self.receive_count}")

    @property
    def run_id(self) -> str:
        """An id of the run that this receive leads to, different for each receive."""
        receive = f"{self.message_id} {self.receive_count} {self.received_at!r}"
        return uuid5(NAMESPACE_OID, receive).hex

    @classmethod
    def from_sqs(
        cls,
        message: Mapping[str, Any],
        *,
        eta: float | None = None,
        held_seconds: float = 0,
        times_given_back: int = 0,
        **known: Any,
    ) -> Delivery:
        """Read a message as ReceiveMessage returned it. A time that it lacks is ``None``.

        Arguments:
            eta: when the task is due, in seconds since the epoch. ``None``: the task has no ETA.
            held_seconds: how long a message may wait in a worker for its ETA, instead of on SQS.
            times_given_back: how often this worker gave the message back without a run.
            known: the fields that do not come from the message, such as ``queue_url``.
        """
        attributes = message.get("Attributes") or {}
        sent_at = _seconds(attributes.get("SentTimestamp"))
        first_at = _seconds(attributes.get("ApproximateFirstReceiveTimestamp"))
        waits, began_at = 0, first_at
        if began_at is None and sent_at is not None:
            # Without the time of the first receive, assume that the message was sent with the
            # longest delay that SQS allows. If the real delay was shorter, the estimate below may
            # have too few receives, but never too many.
            began_at = sent_at + MAX_DELAY_SECONDS
        if eta is not None and began_at is not None:
            # Estimate the receives before the ETA. After each of them, the worker hid the message.
            waits = max(0, math.ceil((eta - began_at - held_seconds) / _HOP_SECONDS))
        return cls(
            message_id=message["MessageId"],
            receive_count=int(attributes.get("ApproximateReceiveCount", 1)),
            first_received_at=first_at,
            sent_at=sent_at,
            deferrals=times_given_back + waits,
            due_at=eta,
            replay_of=replay_of(message) if message.get("MessageAttributes") else None,
            **known,
        )

    @property
    def earlier_runs(self) -> int:
        """The largest possible number of runs before this receive.

        Not every receive leads to a run, so the real number may be lower.
        """
        return max(0, self.receive_count - 1 - self.deferrals)

    @property
    def first_due_at(self) -> float:
        """Time of the first receive at which the task was due. ``retry_for`` begins at this time.

        The time may be an estimate, because SQS reports only the time of the message's first
        receive, and the task may have become due after that receive.
        """
        if self.due_since is not None:
            return self.due_since
        first = self.received_at if self.first_received_at is None else self.first_received_at
        if self.deferrals > 0 and self.earlier_runs == 0:
            return self.received_at
        return first if self.due_at is None else max(first, self.due_at)

    @property
    def is_last_before_sqs_moves_it(self) -> bool:
        """Whether SQS would move the message to the dead-letter queue at its next receive."""
        most = self.max_receive_count
        return most is not None and self.receive_count + self.receives_since >= most

    @property
    def is_next_the_last(self) -> bool:
        """Whether the next receive is the last before SQS would move the message."""
        most = self.max_receive_count
        return most is not None and self.receive_count + self.receives_since + 1 >= most

    @property
    def has_receives_to_spare(self) -> bool:
        """Whether more than half of the receives that the queue allows are left."""
        most = self.max_receive_count
        return most is None or 2 * self.receive_count < most

    @property
    def is_fifo(self) -> bool:
        """Whether the queue is a FIFO queue, where a hidden message holds up its message group."""
        return self.queue_url.endswith(".fifo")

    @property
    def expires_at(self) -> float | None:
        """Time at which SQS deletes the message, hidden or not, at the end of its retention."""
        if self.sent_at is None or self.retention_seconds is None:
            return None
        return self.sent_at + self.retention_seconds

    def visibility_delay(self, delay: float, *, now: float) -> int:
        """Turn a delay into whole seconds that SQS allows, at least 1.

        Shorten the delay so that it ends within 12 hours after the receive and within the queue's
        retention period, both less a margin. Round a fraction up. So evenly spread delays from 0 to
        n become evenly spread delays from 1 to n.
        """
        longest = (
            MAX_VISIBILITY_TIMEOUT_SECONDS
            - TWELVE_HOURS_MARGIN_SECONDS
            - max(0.0, now - self.received_at)
        )
        if self.expires_at is not None:
            longest = min(longest, self.expires_at - _RETENTION_MARGIN_SECONDS - now)
        longest = max(1, math.floor(longest))
        return longest if delay >= longest else max(1, math.ceil(delay))

    def standing(self, *, retries: int, now: float) -> Standing:
        """Return how much of its budgets the message has used, such as time and receives.

        Arguments:
            retries: the highest possible number of runs before this run.
            now: seconds since the epoch.
        """
        expires_at, most = self.expires_at, self.max_receive_count
        return Standing(
            retries=retries,
            elapsed=max(0.0, now - self.first_due_at),
            is_last_receive=self.is_last_before_sqs_moves_it,
            is_overdue=most is not None and self.receive_count > most,
            is_expiring=expires_at is not None and expires_at - now <= _RETENTION_MARGIN_SECONDS,
        )


def parse_eta(header: object) -> float | None:
    """Read the ``eta`` header (ISO 8601, by default UTC) as seconds since the epoch.

    Returns ``None`` if the header is missing or is not a time. Celery itself reports a header that
    is not a time.
    """
    if not isinstance(header, str):
        return None
    try:
        eta = datetime.fromisoformat(header.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).timestamp()


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
