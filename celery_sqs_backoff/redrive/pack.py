"""Which messages fit into one SendMessageBatch?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..limits import MAX_MESSAGE_BYTES
from .letter import Letter, entry_bytes

__all__ = ["Packed", "packed"]

#: A letter with its entry for SendMessageBatch.
Packed = tuple[Letter, dict[str, Any]]


def packed(
    letters: Iterable[Packed], *, size: int, one_per_group: bool = False
) -> Iterator[list[Packed]]:
    """Divide into batches of at most ``size`` entries and 1 MiB (SQS counts all entries together).

    ``one_per_group``: FIFO. A batch holds one message of a group at most, because SQS may take the
    second and fail the first; so the order of a group is that of the batches.
    """
    batch: list[Packed] = []
    groups: set[str | None] = set()
    total = 0
    for letter, entry in letters:
        length = entry_bytes(entry)
        if batch and (
            len(batch) >= size
            or total + length > MAX_MESSAGE_BYTES
            or (one_per_group and letter.group_id in groups)
        ):
            yield batch
            batch, groups, total = [], set(), 0
        batch.append((letter, entry))
        groups.add(letter.group_id)
        total += length
    if batch:
        yield batch
