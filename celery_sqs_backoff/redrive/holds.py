"""Messages that we have received and not settled: hidden by SQS for as long as we say, and no more.

SQS agrees to hide a message longer even when its time is over, without any effect. So what counts
is our own clock, from before the request that returned the message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ..limits import MAX_BATCH_ENTRIES
from .broker import Endpoint
from .letter import Letter

__all__ = ["Holds"]

#: What is put aside until the end is hidden for longer at a time: it can be many.
_ASIDE_SECONDS = 600

#: A message is not sent when so little of its time is left: 2 s of 30.
_MARGIN_SHARE = 1 / 15


@dataclass
class _Hold:
    handle: str
    until: float
    seconds: int


class Holds:
    """Renews what is held, gives back what is not wanted. Safe for threads.

    Arguments:
        source: the queue.
        seconds: for how long ReceiveMessage hides a message, and a renewal.
    """

    def __init__(self, source: Endpoint, seconds: int) -> None:
        self._source = source
        self.seconds = seconds
        self._lock = threading.Lock()
        self._held: dict[str, _Hold] = {}
        self._aside: dict[str, None] = {}

    def add(self, letters: Iterable[Letter], requested_at: float) -> None:
        """These have been received by a request made at ``requested_at`` (monotonic)."""
        with self._lock:
            for letter in letters:
                self._held[letter.id] = _Hold(
                    letter.handle, requested_at + self.seconds, self.seconds
                )

    def drop(self, letters: Iterable[Letter]) -> None:
        """These are deleted, or are to come back by themselves."""
        with self._lock:
            for letter in letters:
                self._held.pop(letter.id, None)
                self._aside.pop(letter.id, None)

    def put_aside(self, letters: Iterable[Letter]) -> None:
        """Keep these hidden until the end: given back now, they would be received again."""
        with self._lock:
            for letter in letters:
                if (hold := self._held.get(letter.id)) is not None:
                    hold.seconds = max(hold.seconds, _ASIDE_SECONDS)
                    self._aside[letter.id] = None

    def is_aside(self, letter: Letter) -> bool:
        """Whether a message has been put aside before: it was received again all the same."""
        with self._lock:
            return letter.id in self._aside

    @property
    def aside(self) -> int:
        with self._lock:
            return len(self._aside)

    def is_ours(self, letter: Letter, now: float) -> bool:
        """Whether nobody else can have received the message meanwhile."""
        with self._lock:
            hold = self._held.get(letter.id)
            return hold is not None and now < hold.until - hold.seconds * _MARGIN_SHARE

    def renew(self, now: float) -> None:
        """Renew what is half over; forget what is over."""
        with self._lock:
            over = [id_ for id_, hold in self._held.items() if now >= hold.until]
            for id_ in over:
                self._held.pop(id_)
                self._aside.pop(id_, None)
            due = [
                (id_, hold)
                for id_, hold in self._held.items()
                if hold.until - now < self.seconds / 2
            ]
        for batch in _tens(due):
            failed = self._change([(hold.handle, hold.seconds) for _, hold in batch])
            with self._lock:
                for i, (_, hold) in enumerate(batch):
                    if i not in failed:
                        hold.until = max(hold.until, now + hold.seconds)

    def give_back(self, letters: Iterable[Letter]) -> None:
        """Show these to other consumers, and to ourselves, at once."""
        with self._lock:
            found = [self._held.pop(letter.id, None) for letter in letters]
        self._show([hold for hold in found if hold is not None])

    def give_all_back(self) -> None:
        with self._lock:
            found = list(self._held.values())
            self._held.clear()
            self._aside.clear()
        self._show(found)

    def _show(self, holds: Sequence[_Hold]) -> None:
        for batch in _tens(holds):
            self._change([(hold.handle, 0) for hold in batch])

    def _change(self, changes: Sequence[tuple[str, int]]) -> set[int]:
        """Returns the positions of those that SQS did not change; their time will run out."""
        try:
            answer = self._source.client.change_message_visibility_batch(
                QueueUrl=self._source.url,
                Entries=[
                    {"Id": str(i), "ReceiptHandle": handle, "VisibilityTimeout": seconds}
                    for i, (handle, seconds) in enumerate(changes)
                ],
            )
        except (ClientError, BotoCoreError):
            return set(range(len(changes)))
        return {int(failed["Id"]) for failed in answer.get("Failed", ())}


def _tens(items: Sequence[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, MAX_BATCH_ENTRIES)):
        yield batch
