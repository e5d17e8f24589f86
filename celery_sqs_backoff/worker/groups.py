"""Runs one message at a time per FIFO message group, in order, also while one backs off.

SQS hands out no further messages of a group while one is hidden. But one receive may bring up to
ten messages of a group, and those would run beside each other in the pool, and go on after the
first of them has failed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..sqs.settlement import Want
from .lease import Lease, State

#: A queue's URL and a MessageGroupId.
Group = tuple[str, str]

#: Closed groups that are remembered: of more messages than can be under way from SQS.
_CLOSED = 1_000

#: The message will not be seen again, so the next of its group may run.
_OVER = {State.DONE, State.DEAD_LETTERED}


class _Closed(NamedTuple):
    """What becomes of messages behind one that comes back.

    Attributes:
        until: they are hidden until then; ``None``: they are shown again at once.
        expect: told of each that is hidden.
    """

    until: float | None = None
    expect: Callable[[Lease], object] | None = None

    def give_back(self, lease: Lease) -> None:
        if self.expect is not None:
            self.expect(lease)
        lease.give_back(until=self.until)


class MessageGroups:
    """Starts the messages of a group in order, each when the one before it is settled.

    A message that backs off, is given back, or is lost, be it at its turn or before, sends those
    waiting behind it back to SQS, which delivers them after it. That costs each of them a receive.
    Behind one that backs off they are hidden for as long: AWS says that a hidden message blocks its
    group, but LocalStack, which follows recorded answers of AWS, hands out a later message that was
    made visible before it. A task that runs on after its message was lost keeps its turn.

    So is what the same receive brings behind a message that does not run at all because this
    worker already backs off with it: SQS handed it out again after a backoff that it never got.

    Order is kept as far as at-least-once delivery can: a message that is done, but whose delete
    never reaches SQS, comes back behind its successors.

    Arguments:
        soon: runs a callable in the worker's event loop, from any thread.
    """

    def __init__(self, soon: Callable[[Callable[[], object]], object]) -> None:
        self._soon = soon
        self._lock = threading.Lock()
        self._waiting: dict[Group, list[tuple[Lease, Callable[[], object]]]] = {}
        #: Groups of which nothing more of their receive may start. Only the newest matter.
        self._closed: OrderedDict[Group, _Closed] = OrderedDict()

    def begin_receive(self, url: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Open the groups of these messages: between two receives, SQS keeps the order itself."""
        if not self._closed:  # always so where no queue is FIFO
            return
        with self._lock:
            for message in messages:
                self._closed.pop((url, _group_id(message)), None)

    def pass_over(self, lease: Lease) -> None:
        """Keep the order behind a message that this worker already holds or has settled."""
        group, goes_on = _group_of(lease), lease.goes_on_with
        if goes_on is None:
            if lease.state not in _OVER:
                self._close_with(group, _closed_by(lease))
        elif goes_on.want is Want.HIDE:
            self._close_with(group, _Closed(goes_on.due_at))
        elif goes_on.want is Want.GIVE_BACK:
            self._close_with(group, _Closed())

    def _close_with(self, group: Group, closed: _Closed) -> None:
        with self._lock:
            self._close(group, closed)

    def _close(self, group: Group, closed: _Closed) -> None:
        """With the lock held: else a later message of the same receive would pass in between."""
        self._closed[group] = closed
        self._closed.move_to_end(group)
        if len(self._closed) > _CLOSED:
            self._closed.popitem(last=False)

    def take_turn(self, lease: Lease, start: Callable[[], object]) -> None:
        """Call ``start`` now, or when all earlier messages of the lease's group are settled.

        Not at all if the lease is settled by then. A lease that has its turn keeps it.
        """
        group = _group_of(lease)
        if self._has_turn(group, lease):
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
        lease.on_end = lambda: self._after(group, lease)
        with self._lock:
            closed = self._closed.get(group)
            is_first = group not in self._waiting
            if closed is None:
                self._waiting.setdefault(group, []).append((lease, start_if_held))
        if closed is not None:
            closed.give_back(lease)
        elif lease.state is not State.HELD:
            # Given back, or lost, since its receive: perhaps before there was anybody to tell.
            self._after(group, lease)
        elif is_first:
            start_if_held()

    def _has_turn(self, group: Group, lease: Lease) -> bool:
        with self._lock:
            turns = self._waiting.get(group)
            return turns is not None and turns[0][0] is lease

    def _after(self, group: Group, lease: Lease) -> None:
        give_back: list[Lease] = []
        closed, start = _closed_by(lease), None
        with self._lock:
            turns = self._waiting.get(group, [])
            place = next((i for i, (other, _) in enumerate(turns) if other is lease), None)
            if place is None:
                return  # given back below, behind an earlier one
            if lease.state not in _OVER and not lease.row.is_over:  # it comes back
                give_back = [later for later, _ in turns[place + 1 :]]
                del turns[place + 1 :]
                self._close(group, closed)
            if not _goes_on(lease):
                del turns[place]
            if not turns:
                del self._waiting[group]
            elif place == 0 and turns[0][0] is not lease:
                start = turns[0][1]
        for later in give_back:
            closed.give_back(later)
        if start is not None:
            self._soon(start)


def _closed_by(lease: Lease) -> _Closed:
    """What becomes of messages behind this one, if it comes back."""
    if lease.state is State.DEFERRED:
        return _Closed(lease.due_at, lease.expect_behind)
    return _Closed()


def _goes_on(lease: Lease) -> bool:
    """Whether the task still runs although its message was lost, so that the group must wait.

    The message may have been received again by this worker since; then the lease is held again.
    """
    is_lost = lease.state is State.LOST and not lease.row.is_over
    return (is_lost or lease.state is State.HELD) and lease.handed_to_pool()


def _group_of(lease: Lease) -> Group:
    return lease.queue.url, lease.group_id or ""


def _group_id(message: Mapping[str, Any]) -> str:
    return (message.get("Attributes") or {}).get("MessageGroupId") or ""
