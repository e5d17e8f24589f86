"""Remembers settled messages, crashes and early returns, in case SQS delivers one again.

It is lost with the process, and not shared; what must not be lost is on the message itself. It is
bounded in entries and in bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TypeVar

from .dead_letter import DeadLetterRecord
from .limits import MAX_IN_FLIGHT_MESSAGES

T = TypeVar("T")

#: Messages remembered of each kind; the oldest are forgotten first. As many as one queue can have
#: in flight: of fewer, messages that are hidden and received in a circle would all be forgotten.
_SIZE = MAX_IN_FLIGHT_MESSAGES


class Memory:
    """Fates and counts by message ID. Safe to use from any thread.

    Others read the attributes, and change them by the methods.

    Attributes:
        fates: of settled messages: the facts for its dead letter;
            ``None``: it is done.
        crashes: runs that ended with their process.
        times_given_back: receives after which the message was given back without having been run.
        due_since: since when a message could have run but for its provider, seconds since the
            epoch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fates: OrderedDict[str, DeadLetterRecord | None] = OrderedDict()
        self.crashes: OrderedDict[str, int] = OrderedDict()
        self.times_given_back: OrderedDict[str, int] = OrderedDict()
        self.due_since: OrderedDict[str, float] = OrderedDict()

    def settled(self, message_id: str, record: DeadLetterRecord | None) -> None:
        """Note that a message is done, or with a record, that it becomes a dead letter.

        The texts of the record, which may be long, are not remembered.
        """
        if record is not None:
            record = replace(record, exception_message=None, traceback=None)
        with self._lock:
            _remember(self.fates, message_id, record)

    def count_crash(self, message_id: str) -> int:
        """Count a run of the message that ended with its process, and return the count."""
        with self._lock:
            return _remember(self.crashes, message_id, self.crashes.get(message_id, 0) + 1)

    def count_given_back(self, message_id: str, *, due_since: float | None = None) -> None:
        """Count a receive after which the message was given back without having been run.

        Arguments:
            due_since: it could have run but for its provider, since this time.
        """
        with self._lock:
            if due_since is not None:
                _remember(self.due_since, message_id, due_since)
            times = self.times_given_back.get(message_id, 0)
            _remember(self.times_given_back, message_id, times + 1)


def _remember(memory: OrderedDict[str, T], key: str, value: T) -> T:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _SIZE:
        memory.popitem(last=False)
    return value
