"""Where dead letters come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from ..sqs.calls import Results
from ..sqs.errors import Failure
from ..sqs.limits import MAX_BATCH_ENTRIES
from .message import DeadLetter
from .queues import Depth, Endpoint

__all__ = ["QueueSource", "tens"]

#: One long poll asks all of SQS's servers; a short one does not, and can miss messages.
_WAIT_SECONDS = 1

T = TypeVar("T")


class QueueSource:
    """A dead-letter queue. Safe for threads; calls are tried once.

    Attributes:
        key: its ARN, by which a journal knows it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self.key = str(endpoint.arn)
        self.is_fifo = endpoint.is_fifo
        self._endpoint = endpoint

    def depth(self) -> Depth:
        """Messages in the queue, hidden and delayed ones included.

        Raises:
            RedriveError: SQS does not say, tried several times.
        """
        return self._endpoint.depth()

    def receive(self, messages: int, hold_seconds: int) -> list[DeadLetter] | Failure:
        """Receive up to ten messages, with all their attributes, hidden for so many seconds."""
        received = self._endpoint.calls.receive(
            max_messages=messages,
            wait_seconds=_WAIT_SECONDS,
            visibility_timeout_seconds=hold_seconds,
        )
        if received.failure is not None:
            return received.failure
        return [DeadLetter(message) for message in received.messages]

    def delete(self, handles: Sequence[str]) -> Results:
        """Delete up to ten messages."""
        return self._endpoint.calls.delete(handles)

    def hide(self, handles: Sequence[str], seconds: int) -> Results:
        """Hide up to ten messages for so many seconds from now; 0 = show them at once."""
        return self._endpoint.calls.change_visibility([(handle, seconds) for handle in handles])


def tens(items: Sequence[T]) -> Iterator[list[T]]:
    """Divide into what fits one batch."""
    iterator = iter(items)
    while batch := list(islice(iterator, MAX_BATCH_ENTRIES)):
        yield batch
