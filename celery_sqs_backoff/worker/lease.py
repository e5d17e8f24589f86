"""The hold on one received message, from its receive to its one settlement.

A lease is a row of the settlement table. It adds what the table does not need: the message itself,
its place in the prefetch window, and which task to tell of a loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..observe.events import MessageHidden
from ..sqs.calls import Calls
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.delivery import Delivery
from ..sqs.queues import Queue
from ..sqs.settlement import Content, Row
from ..sqs.settlement import State as State

if TYPE_CHECKING:
    from .keeper import Keeper

#: Of all leases: a settlement takes it for two assignments.
_GUARD = threading.Lock()


class Lease(Row):
    """One received message, held until it is settled once.

    Settling says what SQS is to be asked; the keeper asks. The first settlement wins, any later
    one returns ``False``: whoever loses a race with it has nothing to do. No method blocks or
    raises.

    Arguments:
        calls: the port to the message's queue.
        queue: the queue's attributes.
        message: the message as ReceiveMessage returned it.
        body: its body as it is on the queue.
        delivery: the same receive, in numbers.
        received_at: when the worker saw the message, by the keeper's clock.
        keeper: carries out the settlement; notified once, in the settling thread.
        free: releases the message's place in the prefetch window; called once.
        hidden_seconds: what the receive asked for; ``None``: the queue's visibility timeout.
    """

    __slots__ = (
        "__weakref__",
        "attributes",
        "awaits_turn",
        "body",
        "calls",
        "delivery",
        "free",
        "gives_up_at",
        "group_id",
        "handed_to_pool",
        "keeper",
        "keeps_place",
        "on_lost",
        "slot_at",
        "trace_header",
    )

    def __init__(
        self,
        *,
        calls: Calls,
        queue: Queue,
        message: dict[str, Any],
        body: str,
        delivery: Delivery,
        received_at: float,
        keeper: Keeper,
        free: Callable[[], None],
        hidden_seconds: int | None = None,
    ) -> None:
        super().__init__(
            queue,
            delivery.message_id,
            message["ReceiptHandle"],
            received_at,
            guard=_GUARD,
            hidden_seconds=hidden_seconds,
        )
        self.keeper = keeper
        self.calls = calls
        self.attributes: dict[str, Any] = message.get("MessageAttributes") or {}
        system: dict[str, str] = message.get("Attributes") or {}
        self.group_id: str | None = system.get("MessageGroupId")
        self.trace_header: str | None = system.get("AWSTraceHeader")
        self.body = body
        self.delivery = delivery
        self.free: Callable[[], None] = free
        #: The task's, in seconds, and when it is over, since the epoch; set once that is known.
        self.gives_up_at: float | None = None
        #: Whether the task may be running: asked when the connection is lost.
        self.handed_to_pool: Callable[[], bool] = _no
        #: Told, once, that somebody else may have the message. Must not block.
        self.on_lost: Callable[[], None] | None = None
        #: Its slot at its provider's rate; ``None``: it has none, or its task has begun.
        self.slot_at: float | None = None
        #: Whether it waits for its turn at a provider that recovers.
        self.awaits_turn = False
        #: Whether it takes up a process's place in the prefetch window while it waits for either.
        self.keeps_place = False

    def is_settled(self) -> bool:
        """Whether it is no longer held."""
        return self.state is not State.HELD

    # Settling

    def done(self) -> bool:
        """Delete the message: its task is finished. If it was lost, this worker runs it no more."""
        return self._settle(State.DELETE, is_finished=True)

    def drop(self) -> bool:
        """Delete the message: its task is given up. If it was lost, it runs again."""
        return self._settle(State.DELETE)

    def defer(self, seconds: float) -> bool:
        """Hide the message for ``seconds`` from now on."""
        return self._settle(State.HIDE, due_at=self.keeper.clock() + seconds)

    def release(self) -> bool:
        """Give the message back, to be received again at once."""
        return self._settle(State.GIVE_BACK, due_at=self.keeper.clock())

    def give_back(self, *, until: float | None = None, was_due: bool = False) -> bool:
        """Give back a message whose task has not been started: this receive was no attempt.

        Arguments:
            until: hide it until then, by the keeper's clock. ``None``: show it at once.
            was_due: it could have run but for its provider, so ``retry_for`` has begun.
        """
        message_id = self.delivery.message_id
        if self.state is State.HELD:  # else whoever has settled it has counted it
            due_since = self.delivery.first_due_at if was_due else None
            self.keeper.memory.count_given_back(message_id, due_since=due_since)
        if until is not None:
            return self._settle(State.HIDE, due_at=until)
        return self.release()

    def dead_letter(self, record: DeadLetterRecord) -> bool:
        """Send the message, with the record on it, to the queue's dead-letter queue."""
        return self._settle(State.DEAD_LETTER, record=record, content=self._content())

    def lose(self) -> None:
        """Settle nothing any more, because somebody else may have the message. Tell the task."""
        if self.become(State.LOST, may_be_lost=True):
            self.keeper.settled(self)
            self.tell_of_loss()

    def tell_of_loss(self) -> None:
        """Tell the task that somebody else may have the message."""
        told, self.on_lost = self.on_lost, None
        if told is not None:
            told()

    def merge(self) -> None:
        """Note that an earlier receive goes on with this one's handle: there is nothing to run."""
        self.become(State.LOST, is_over=True)
        self.free_place()

    def shed(self) -> None:
        self.body, self.attributes = "", {}
        self.handed_to_pool, self.on_lost = _no, None

    def free_place(self) -> None:
        """Give the place in the prefetch window back, once."""
        free, self.free = self.free, _nothing
        free()

    def _settle(self, state: State, *, is_finished: bool = False, **facts: Any) -> bool:
        was = self.become(state, **facts)
        if was is None:
            return False
        if was is State.LOST:
            if is_finished:  # should this worker receive it once more, it need not run again
                self.keeper.memory.settled(self.delivery.message_id, None)
            self.keeper.ended(self)
            return False
        if state is State.HIDE:
            self._tell_hidden(facts["due_at"])
        self.keeper.settled(self)
        return True

    def _tell_hidden(self, due_at: float) -> None:
        hidden = MessageHidden(
            queue=self.queue.name,
            message_id=self.delivery.message_id,
            seconds=due_at - self.keeper.clock(),
            sent_at=self.delivery.sent_at,
            eta=self.delivery.due_at,
            gives_up_at=self.gives_up_at,
        )
        self.keeper.events.emit(hidden)

    def _content(self) -> Content:
        return Content(self.body, self.attributes, self.group_id, self.trace_header)


def may_start(lease: Lease) -> bool:
    """Return whether the message is surely this worker's, now that its task is to start.

    A process that was stopped for longer than the visibility timeout (``docker pause``, a machine
    that was suspended) goes on before the keeper has noticed.
    """
    if lease.state is State.HELD and lease.keeper.clock() >= lease.visible_at:
        lease.lose()
    return lease.state is State.HELD


def _no() -> bool:
    return False


def _nothing() -> None:
    pass
