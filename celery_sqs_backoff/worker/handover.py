"""The calls of a worker that stops: messages that it has hidden come back soon, for others.

A few threads make them side by side, for a few seconds at the most; nobody waits for one of them
longer than that. A message that no call has reached comes back when its hold ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from celery.utils.log import get_logger

from ..provider.gate import Hidden
from ..sqs.calls import Calls
from ..sqs.limits import MAX_BATCH_ENTRIES
from ..threads import start_daemon

__all__ = ["LONGEST_SECONDS", "Batch", "batches", "hand_over"]

logger = get_logger(__name__)

#: A stopping worker waits for these calls for so long at the most.
LONGEST_SECONDS: Final = 5.0

_THREADS: Final = 8

#: A queue's URL, and receipt handles with seconds from now.
Batch = tuple[str, list[tuple[str, int]]]


def batches(nearer: Iterable[tuple[Hidden, int]]) -> Iterator[Batch]:
    """Yield calls of up to ten messages, the furthest due first."""
    by_queue: dict[str, list[tuple[str, int]]] = {}
    for hidden, seconds in sorted(nearer, key=lambda each: -each[0].until):
        url = hidden.queue
        batch = by_queue.setdefault(url, [])
        batch.append((hidden.handle, seconds))
        if len(batch) == MAX_BATCH_ENTRIES:
            yield url, by_queue.pop(url)
    yield from by_queue.items()


def hand_over(
    nearer: Sequence[tuple[Hidden, int]],
    calls: Callable[[str], Calls],
    *,
    longest_seconds: float = LONGEST_SECONDS,
) -> int:
    """Carry the calls out side by side; return how many messages SQS has confirmed in time.

    A queue of which a call fails as a whole is left alone. Does not raise.
    """
    done = _carry_out(batches(nearer), calls, longest_seconds)
    if nearer:
        logger.info(
            "sqs_backoff.provider_handed_over: %d of %d hidden messages come back within %d s,"
            " because this worker stops",
            done,
            len(nearer),
            max(seconds for _, seconds in nearer),
        )
    return done


def _carry_out(
    waiting: Iterable[Batch], calls: Callable[[str], Calls], longest_seconds: float
) -> int:
    left, away, done = deque(waiting), set[str](), list[int]()
    deadline = time.monotonic() + longest_seconds

    def work() -> None:
        while left and time.monotonic() < deadline:
            try:
                url, entries = left.popleft()
            except IndexError:  # another thread was faster
                return
            if url in away:
                continue
            results = calls(url).change_visibility(entries)
            if any(failure is not None and failure.is_of_call for failure in results):
                away.add(url)
            done.append(results.count(None))

    threads = []
    for _ in range(min(_THREADS, len(left))):
        thread = start_daemon("sqs-handover", work)
        if thread is None:
            break
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sum(done)
