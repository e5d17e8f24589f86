"""One SendMessageBatch, and what is known about each message after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..sqs.calls import Calls
from ..sqs.errors import Failure, Kind
from ..sqs.limits import MAX_DELAY_SECONDS, MAX_MESSAGE_BYTES
from .message import DeadLetter, entry_bytes

__all__ = ["Packed", "Result", "entries_for", "for_destination", "packed", "send"]

#: A message with its entry for SendMessageBatch.
Packed = tuple[DeadLetter, dict[str, Any]]

#: Nothing was sent, and no other message will fare better.
_CLOSED = {Kind.DENIED, Kind.NO_QUEUE, Kind.LOCAL, Kind.UNSUPPORTED}


@dataclass
class Result:
    """What became of a batch.

    Attributes:
        again: not sent; worth another try.
        refused: not sent as it is, with SQS's code.
        in_doubt: nobody knows.
        lost: not sent, because they may have been received again.
        closed: no message of ours will be accepted, and why.
        failure: of what is to be tried again or is in doubt.
    """

    sent: list[DeadLetter] = field(default_factory=list)
    again: list[Packed] = field(default_factory=list)
    refused: list[tuple[Packed, str]] = field(default_factory=list)
    in_doubt: list[Packed] = field(default_factory=list)
    lost: list[DeadLetter] = field(default_factory=list)
    closed: Failure | None = None
    failure: Failure | None = None

    @property
    def unsent(self) -> list[DeadLetter]:
        """Those that SQS has not accepted, for certain."""
        return [x for x, _ in self.again] + [entry[0] for entry, _ in self.refused]


def send(calls: Calls, batch: Sequence[Packed]) -> Result:
    """Send up to ten messages to one queue. Never raises."""
    found = Result()
    results = calls.send([entry for _, entry in batch])
    for item, result in zip(batch, results, strict=True):
        failure = result.failure
        if failure is None:
            found.sent.append(item[0])
        elif failure.may_have_been_done:
            found.in_doubt.append(item)
            found.failure = failure
        elif failure.kind in _CLOSED:
            found.again.append(item)
            found.closed = failure
        elif failure.is_transient:
            found.again.append(item)
            found.failure = failure
        else:
            found.refused.append((item, failure.code))
    return found


def for_destination(
    message: DeadLetter, *, is_fifo: bool, now: float, spread: float, rng: Random
) -> dict[str, object]:
    """Group, deduplication and delay, as the type of the queue wants them.

    The deduplication id is not the message's own: within five minutes of its first send SQS would
    discard the replay and report it as sent. A message has a new id in each of its lives, so a run
    that is resumed asks with the same one, and SQS sends nothing twice.

    Arguments:
        now: seconds since the epoch.
        spread: seconds; each message gets a random delay up to this (standard queues).
    """
    added: dict[str, object] = {}
    if message.group_id is not None:  # on standard queues too: fair queues
        added["MessageGroupId"] = message.group_id
    if is_fifo:
        added.setdefault("MessageGroupId", "default")
        added["MessageDeduplicationId"] = f"redrive-{message.id}"[:128]
        return added
    delay = message.due_in(now)
    if spread:
        delay += rng.uniform(0, spread)
    if delay >= 1:
        added["DelaySeconds"] = min(MAX_DELAY_SECONDS, int(delay))
    return added


def entries_for(
    messages: Iterable[DeadLetter],
    *,
    run_id: str,
    is_fifo: bool,
    extend: bool,
    now: float,
    spread: float,
    rng: Random,
) -> tuple[list[Packed], list[DeadLetter]]:
    """Make the entries for SendMessageBatch; return them, and the messages of which none can be.

    Arguments: as for :meth:`DeadLetter.entry` and :func:`for_destination`.
    """
    found: list[Packed] = []
    unreadable: list[DeadLetter] = []
    for message in messages:
        try:
            entry = message.entry(run_id=run_id, now=now, extend=extend)
            entry |= for_destination(
                message,
                is_fifo=is_fifo,
                now=now,
                spread=spread,
                rng=rng,
            )
        except Exception:  # noqa: BLE001  # written by a stranger: no message may end the run
            unreadable.append(message)
        else:
            found.append((message, entry))
    return found, unreadable


def packed(
    messages: Iterable[Packed], *, size: int, one_per_group: bool = False
) -> Iterator[list[Packed]]:
    """Divide into batches of at most ``size`` entries and 1 MiB (SQS counts all entries together).

    ``one_per_group``: FIFO. A batch holds at most one message of a group, because SQS may accept
    the second and fail the first; so the order of a group is that of the batches.
    """
    batch: list[Packed] = []
    groups: set[str | None] = set()
    total = 0
    for message, entry in messages:
        length = entry_bytes(entry)
        if batch and (
            len(batch) >= size
            or total + length > MAX_MESSAGE_BYTES
            or (one_per_group and message.group_id in groups)
        ):
            yield batch
            batch, groups, total = [], set(), 0
        batch.append((message, entry))
        groups.add(message.group_id)
        total += length
    if batch:
        yield batch
