"""What a worker remembers of messages that SQS may hand out again: their fate, and their crashes.

It is lost with the worker, and not shared; what must not be lost is on the message itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from ..deadletter import DeadLetterRecord

__all__ = ["Memory"]

#: Messages remembered of each kind; the oldest are forgotten first.
_SIZE = 10_000


class Memory:
    """Fates and crashes by message id. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fates: OrderedDict[str, DeadLetterRecord | None] = OrderedDict()
        self._crashes: OrderedDict[str, int] = OrderedDict()
        self._unrun: OrderedDict[str, int] = OrderedDict()

    def settled(self, message_id: str, record: DeadLetterRecord | None) -> None:
        """Note that a message is done, or with a record, that it is to be a dead letter."""
        with self._lock:
            _remember(self._fates, message_id, record)

    def knows(self, message_id: str) -> bool:
        """Whether the message has been settled."""
        with self._lock:
            return message_id in self._fates

    def record(self, message_id: str) -> DeadLetterRecord | None:
        """What a settled message is to carry to the dead-letter queue; ``None``: it is done."""
        with self._lock:
            return self._fates.get(message_id)

    def count_crash(self, message_id: str) -> int:
        """Count a run of the message that ended with its process; return how many did so far."""
        return self._count(self._crashes, message_id)

    def crashes(self, message_id: str) -> int:
        with self._lock:
            return self._crashes.get(message_id, 0)

    def count_unrun(self, message_id: str) -> int:
        """Count a receive after which the message was given back without having been run."""
        return self._count(self._unrun, message_id)

    def unrun(self, message_id: str) -> int:
        with self._lock:
            return self._unrun.get(message_id, 0)

    def _count(self, memory: OrderedDict[str, int], message_id: str) -> int:
        with self._lock:
            count = memory.get(message_id, 0) + 1
            _remember(memory, message_id, count)
            return count


def _remember(memory: OrderedDict[str, Any], key: str, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _SIZE:
        memory.popitem(last=False)
