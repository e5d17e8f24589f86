"""One at a time per message group of a FIFO queue, and none before one that backs off.

SQS hands out no further messages of a group while one is hidden. But one receive may bring up to
ten messages of a group, and those would run beside each other in the pool, and go on after the
first of them has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .lease import Lease, State

__all__ = ["MessageGroups"]

#: The message will not be seen again, so the next of its group may run.
_OVER = {State.DONE, State.DEAD_LETTERED}


class MessageGroups:
    """Starts the messages of a group in order, each when the one before it is settled.

    A message that backs off, is given back, or is lost, be it at its turn or before, sends those
    waiting behind it back to SQS, which delivers them after it. That costs each of them a receive.
    Behind one that backs off they are hidden for as long: AWS says that a hidden message blocks its
    group, but LocalStack, which follows recorded answers of AWS, hands out a later message that was
    made visible before it.

    Order is kept as far as at-least-once delivery can: a message that is done, but whose delete
    never reaches SQS, comes back behind its successors.

    Arguments:
        soon: runs a callable in the worker's event loop, from any thread.
    """

    def __init__(self, soon: Callable[[Callable[[], object]], object]) -> None:
        self._soon = soon
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[tuple[Lease, Callable[[], object]]]] = {}

    def take_turn(self, lease: Lease, start: Callable[[], object]) -> None:
        """Call ``start`` now, or when all earlier messages of the lease's group are settled.

        Not at all if the lease is settled by then. A lease that has its turn keeps it.
        """
        group = (lease.queue.url, lease.group_id or "")
        with self._lock:
            turns = self._waiting.get(group)
            has_turn = turns is not None and turns[0][0] is lease
        if has_turn:
            start()
            return

        def start_if_held() -> None:
            if lease.state is State.HELD:
                start()

        free = lease.free

        def settled() -> None:
            free()
            self._after(group, lease)

        lease.free = settled
        with self._lock:
            is_first = group not in self._waiting
            self._waiting.setdefault(group, []).append((lease, start_if_held))
        if is_first:
            start_if_held()

    def _after(self, group: tuple[str, str], lease: Lease) -> None:
        give_back: list[Lease] = []
        start = None
        with self._lock:
            turns = self._waiting.get(group, [])
            place = next((i for i, (other, _) in enumerate(turns) if other is lease), None)
            if place is None:
                return  # given back below, behind an earlier one
            if lease.state not in _OVER:
                give_back = [later for later, _ in turns[place + 1 :]]
                del turns[place + 1 :]
            del turns[place]
            if not turns:
                del self._waiting[group]
            elif place == 0:
                start = turns[0][1]
        until = lease.due_at if lease.state is State.DEFERRED else None
        for later in give_back:
            later.give_back_unrun(until=until)
        if start is not None:
            self._soon(start)
