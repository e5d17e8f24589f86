"""The hold on one received message, from its receive to its one settlement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..deadletter import DeadLetterRecord
from ..delivery import Delivery
from ..limits import MAX_VISIBILITY_TIMEOUT_SECONDS, MAX_WAIT_TIME_SECONDS
from ..queues import Queue

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

    from .keeper import Keeper

__all__ = ["Lease", "State"]

#: A renewal asks for at least this much, however short the queue's own visibility timeout is: it
#: bounds the calls, and the time that a message of a killed worker stays hidden.
_MIN_RENEWAL_SECONDS = 10

#: As in ``budget``: SQS counts its 12 hours from before the worker saw the message.
_TWELVE_HOURS_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 40


class State(Enum):
    """What became of a lease. ``HELD`` is the only state that can be left."""

    HELD = "held"
    DONE = "done"  # delete the message
    DEFERRED = "deferred"  # hide it until ``due_at``
    RELEASED = "released"  # give it back now
    DEAD_LETTERED = "dead-lettered"  # send it to the dead-letter queue, then delete it
    LOST = "lost"  # SQS no longer honours the receipt handle: hands off
    MERGED = "merged"  # an earlier lease of this worker on the same message goes on with the handle


class Lease:
    """One received message, held until it is settled once.

    Settling says what SQS is to be asked; the keeper asks. The first settlement wins, any later
    one returns ``False``: whoever loses a race with it has nothing to do. No method blocks or
    raises.

    Arguments:
        client: the client to settle with (its credentials are those of the receive).
        queue: the queue's attributes.
        message: the message as ReceiveMessage returned it.
        body: its body as it is on the queue.
        delivery: the same receive, in numbers.
        received_at: when the worker saw the message, by the monotonic clock.
        keeper: who carries the settlement out; told once, in the settling thread.
        free: gives the message's place in the prefetch window back.
    """

    __slots__ = (
        "__weakref__",
        "_lock",
        "attributes",
        "body",
        "client",
        "delivery",
        "due_at",
        "free",
        "group_id",
        "handed_to_pool",
        "in_doubt",
        "keeper",
        "may_be_lost",
        "on_lost",
        "park",
        "park_above",
        "queue",
        "receipt_handle",
        "received_at",
        "record",
        "renew_at",
        "state",
        "visible_at",
    )

    def __init__(
        self,
        *,
        client: SQSClient,
        queue: Queue,
        message: dict[str, Any],
        body: str,
        delivery: Delivery,
        received_at: float,
        keeper: Keeper,
        free: Callable[[], None],
    ) -> None:
        self.keeper = keeper
        self.client = client
        self.queue = queue
        self.receipt_handle: str = message["ReceiptHandle"]
        self.attributes: dict[str, Any] = message.get("MessageAttributes") or {}
        self.group_id: str | None = (message.get("Attributes") or {}).get("MessageGroupId")
        self.body = body
        self.delivery = delivery
        self.received_at = received_at
        self.state = State.HELD
        #: DEFERRED, RELEASED: when the message is to be seen again, by the monotonic clock.
        self.due_at = received_at
        #: DEAD_LETTERED: why.
        self.record: DeadLetterRecord | None = None
        self.free = free
        #: Whether the task may be running: asked when the connection is lost.
        self.handed_to_pool: Callable[[], bool] = _no
        #: DEFERRED: from which share of the queue's quota in flight on the message is not hidden
        #: but made a dead letter (``None``: never), and the record for that.
        self.park_above: float | None = None
        self.park: Callable[[float], DeadLetterRecord] | None = None
        #: Its visibility timeout has run out unrenewed: a standard queue still takes the receipt
        #: handle then, and applies it to whoever has the message by now.
        self.may_be_lost = False
        #: DEFERRED, RELEASED: SQS may have been told, but its answer was lost.
        self.in_doubt = False
        #: Told, once, that somebody else may have the message. Must not block.
        self.on_lost: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self.renewed(received_at, queue.visibility_timeout_seconds)

    # Settling

    def done(self) -> bool:
        """The message has served: delete it."""
        return self._settle(State.DONE)

    def defer(
        self,
        seconds: float,
        *,
        park_above: float | None = None,
        park: Callable[[float], DeadLetterRecord] | None = None,
    ) -> bool:
        """Hide the message for ``seconds`` from now on.

        Arguments:
            park_above: share of the queue's quota of messages in flight, above 0 to 1; from there
                on the message goes to the dead-letter queue instead. ``None``: never.
            park: makes the record for that, of the seconds that were left to wait.
        """
        due_at = self.keeper.clock() + seconds
        return self._settle(State.DEFERRED, due_at=due_at, park_above=park_above, park=park)

    def release(self) -> bool:
        """Give the message back, to be received again at once."""
        return self._settle(State.RELEASED)

    def give_back_unrun(self, *, until: float | None = None) -> bool:
        """Give back a message whose task has not been started: this receive was no attempt.

        Arguments:
            until: hide it until then, by the monotonic clock. ``None``: show it at once.
        """
        self.keeper.memory.count_unrun(self.delivery.message_id)
        return self.release() if until is None else self._settle(State.DEFERRED, due_at=until)

    def dead_letter(self, record: DeadLetterRecord) -> bool:
        """Send the message, with the record on it, to the queue's dead-letter queue."""
        return self._settle(State.DEAD_LETTERED, record=record)

    def lose(self) -> bool:
        """The receipt handle is void: settle nothing, and tell the task."""
        is_lost = self._settle(State.LOST)
        if is_lost:
            self.tell_of_loss()
        return is_lost

    def tell_of_loss(self) -> None:
        """Tell the task that somebody else may have the message.

        If it succeeds, the message is still deleted: whoever has it need not do it again.
        """
        self.may_be_lost = True
        told, self.on_lost = self.on_lost, None
        if told is not None:
            told()

    def merge_into(self, earlier: Lease) -> bool:
        """Let an earlier lease on the same message go on with this one's receipt handle."""
        with earlier._lock:
            if earlier.state is not State.HELD:
                return False
            earlier.receipt_handle = self.receipt_handle
            earlier.received_at = self.received_at
            earlier.visible_at, earlier.renew_at = self.visible_at, self.renew_at
            earlier.may_be_lost = False
        return self._settle(State.MERGED)

    def _settle(self, state: State, **facts: Any) -> bool:
        with self._lock:
            if self.state is not State.HELD:
                return False
            for name, value in facts.items():
                setattr(self, name, value)
            self.state = state
        self.keeper.settled(self)
        return True

    # Renewing: the keeper's thread only

    def renewed(self, asked_at: float, seconds: int) -> None:
        """Note that the message is hidden for ``seconds`` from ``asked_at`` on."""
        self.visible_at = asked_at + seconds
        self.renew_at = asked_at + seconds / 3

    def renewal_seconds(self, now: float) -> int:
        """What to ask of SQS at a renewal; 0 or less when the 12 hours are used up."""
        held = now - self.received_at
        return min(
            max(self.queue.visibility_timeout_seconds, _MIN_RENEWAL_SECONDS),
            int(MAX_VISIBILITY_TIMEOUT_SECONDS - _TWELVE_HOURS_MARGIN_SECONDS - held),
        )


def _no() -> bool:
    return False
