"""One received message, from its receive until SQS has confirmed its settlement.

A settlement deletes the message, hides it, gives it back (lets SQS show it at once), or sends it to
the dead-letter queue. Before the settlement, renewals extend the message's visibility timeout. This
file owns the states of a message and the transitions between them. The settlement table
(:mod:`.settlement`) makes the transitions and plans the calls to SQS. Each worker has one such
table, its keeper (:mod:`.keeper`), which also makes the calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..retry.budget import GiveUpReason
from ..retry.options import Options
from ..sqs.calls import Calls
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.delivery import TWELVE_HOURS_MARGIN_SECONDS, Delivery
from ..sqs.hidden import Recall
from ..sqs.limits import MAX_VISIBILITY_TIMEOUT_SECONDS
from ..sqs.queues import Queue
from ..sqs.redact import ErrorText

if TYPE_CHECKING:
    from .providers import Gate
    from .settlement import SettlementTable

#: A renewal asks for at least this many seconds, even if the queue's visibility timeout is shorter.
#: So a short timeout does not cause many calls. But if a worker is killed, its messages may
#: stay hidden for this time, although the queue's timeout is shorter.
_MIN_RENEWAL_SECONDS = 10

#: The worker renews a message when this share of the visibility timeout is over. If a renewal
#: fails, the rest of the timeout is left for more tries.
RENEW_AT_SHARE = 1 / 3

#: If a message's delete or dead letter has failed more often than this, each renewal asks SQS to
#: hide the message for longer: at least 60 s after the fourth failure, 120 s after the fifth, and
#: so on, up to 900 s. Fewer failures may be transient, and after them short renewals are better,
#: because the message comes back soon if the worker is killed.
_TRANSIENT_FAILURES = 3
_FIRST_KEEP_HIDDEN_SECONDS = 60
_MAX_KEEP_HIDDEN_SECONDS = 900


class State(Enum):
    """The state of a message in its worker.

    The purpose of a call to SQS has the same values (``settlement.CallEntry``).
    """

    HELD = "held"
    DELETE = "delete"
    DEAD_LETTER = "dead letter"
    GIVE_BACK = "give back"
    HIDE = "hide"
    HIDDEN = "hidden"
    BRING_FORWARD = "bring forward"
    LOST = "lost"


#: The allowed transitions, each with its reason. A received message is HELD. In the states DELETE,
#: DEAD_LETTER, GIVE_BACK, HIDE and BRING_FORWARD, the worker waits for a response of SQS. ``None``:
#: the worker forgets the message.
TRANSITIONS: dict[State, dict[State | None, str]] = {
    State.HELD: {
        State.DELETE: "its task is finished, or given up without a dead letter",
        State.DEAD_LETTER: "its task is given up",
        State.GIVE_BACK: "its task has not started, or ends with the worker",
        State.HIDE: "its task is not due, is retried, or waits for its provider",
        State.LOST: "another worker may have it, and its renewals end",
    },
    State.DELETE: {None: "SQS has deleted it"},
    State.DEAD_LETTER: {State.DELETE: "its dead letter is sent, or has no queue to go to"},
    State.GIVE_BACK: {None: "SQS shows it"},
    State.HIDE: {
        State.HIDDEN: "SQS hides it, and this worker may bring it forward",
        None: "SQS hides it until it is due",
    },
    State.HIDDEN: {
        State.BRING_FORWARD: "its provider takes calls again, or this worker stops",
        None: "it is almost due",
    },
    State.BRING_FORWARD: {None: "SQS shows it earlier"},
    State.LOST: {
        State.HELD: "it is received again while its task runs",
        None: "its task has ended",
    },
}

#: In each of these states, the table plans a call that changes the visibility timeout. Before this
#: call, the table does not renew the message.
HIDING = frozenset({State.HIDE, State.BRING_FORWARD, State.GIVE_BACK})


def _no() -> bool:
    return False


def _do_nothing() -> None:
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One received message, which the worker holds until the message is settled.

    Methods such as :meth:`done` settle it. They let the keeper set a new state, under its lock, and
    the keeper makes the calls to SQS later. Only the first settlement counts. A later call returns
    ``False``. No method blocks or raises. Times are seconds of the keeper's clock.

    Arguments:
        queue: the queue's attributes.
        calls: makes the calls to the queue.
        message: the message as ReceiveMessage returned it.
        body: its body, unchanged.
        delivery: the facts of this receive.
        received_at: when the worker received the message.
        keeper: carries out the settlement.
        free: releases the message's place in the prefetch window (the number of messages that may
            run or wait for a process). A second call has no effect.
        hidden_seconds: the visibility timeout that the receive call asked for. ``None``: the
            queue's own.
    """

    queue: Queue
    calls: Calls
    message: dict[str, Any]
    body: str
    delivery: Delivery
    received_at: float
    keeper: SettlementTable
    free: Callable[[], None] = _do_nothing
    hidden_seconds: int | None = None

    message_id: str = field(init=False)
    #: The newest receipt handle.
    handle: str = field(init=False)
    #: kombu's delivery tag. It is the receipt handle of this receive, and never changes.
    tag: str = field(init=False)
    #: The message's key in the table: the queue's URL and the message ID.
    key: tuple[str, str] = field(init=False)

    # On its way to the pool

    #: The name of its queue in Celery.
    source: str = ""
    #: The dict with the task, which kombu delivers to Celery. ``None``: the message is no task, for
    #: the reason in ``why``. Empty: the app's adapter says that the message needs no task.
    payload: dict[str, Any] | None = None
    why: str = ""
    #: The options of its task. ``None``: the task is not known, or has another base class.
    options: Options | None = None
    #: The gate (circuit breaker) of its task's provider. ``None``: the task has no provider, or
    #: Celery has not found the task yet.
    gate: Gate | None = None
    #: Whether the message must wait in Celery for its ETA or for a rate limit. After that wait, the
    #: worker checks again whether its task may run.
    waits_in_celery: bool = False
    #: The inbox calls this to continue with a message that has waited for its provider. ``None``:
    #: the inbox gives the message to Celery.
    go_on: Callable[[], object] | None = None
    #: Why the worker gives the message up without a run. ``None``: its task may run.
    refused: GiveUpReason | None = None
    #: Returns whether the pool has the task, which may be running already.
    handed_to_pool: Callable[[], bool] = _no
    #: Called once when another worker may have the message. Must not block.
    on_lost: Callable[[], None] | None = None
    #: True from the time when its provider's gate lets the task start until the task begins.
    has_turn: bool = False
    #: Whether the message counts in the prefetch window while it waits for its provider. A message
    #: that waits for a process always counts.
    keeps_place: bool = False

    # Its settlement

    state: State = State.HELD
    #: When its visibility timeout ends.
    visible_at: float = 0.0
    #: When to renew it.
    renew_at: float = 0.0
    #: In the states HIDE, BRING_FORWARD and GIVE_BACK: when SQS should show the message again.
    due_at: float = field(init=False)
    #: In the states HIDE and HIDDEN: the permission to let SQS show the message early, or ``None``.
    recall: Recall | None = None
    #: In the state DEAD_LETTER: the record to send with it. ``None``: without a record.
    record: DeadLetterRecord | None = None
    #: Whether another worker may have the message, because a renewal came too late or was refused.
    #: Then this worker does not hide it or give it back. A standard queue would accept the old
    #: receipt handle, and the call would change the other worker's visibility timeout.
    may_be_lost: bool = False
    #: Only for the states in HIDING: whether an earlier call for this state got no response. SQS
    #: may have carried out that call.
    in_doubt: bool = False
    #: Whether the message was lost, and no run uses this lease any more. A later receive of the
    #: message makes a new lease.
    is_over: bool = False
    #: How often the call for its present state has failed.
    failures: int = 0
    #: Whether to call SQS for this message alone, without a batch. SQS refused a whole batch that
    #: included it.
    goes_alone: bool = False

    def __post_init__(self) -> None:
        self.message_id = self.delivery.message_id
        self.handle = self.tag = self.message["ReceiptHandle"]
        self.key = self.queue.url, self.message_id
        self.due_at = self.received_at
        seconds = self.hidden_seconds or self.queue.visibility_timeout_seconds
        self.extend(self.received_at, seconds)

    def is_settled(self) -> bool:
        """Return whether the message is settled or lost, so that the worker no longer holds it."""
        return self.state is not State.HELD

    def may_start(self) -> bool:
        """Return whether the worker still holds the message. Call this just before its task starts.

        If its visibility timeout is over, mark it as lost first. After a pause of the whole worker
        (``docker pause``, a suspended machine) the keeper may not have noticed the loss yet.
        """
        if self.state is State.HELD and self.keeper.clock() >= self.visible_at:
            self.lose()
        return self.state is State.HELD

    # Settling: each method returns whether this call has settled the message

    def done(self) -> bool:
        """Delete the message of a finished task.

        If the message was lost, this worker deletes it when it receives the message again. It does
        not run the task again.
        """
        return self.keeper.settle(self, State.DELETE, is_finished=True)

    def drop(self) -> bool:
        """Delete the message of a task that is given up. A lost message may run again."""
        return self.keeper.settle(self, State.DELETE)

    def defer(self, seconds: float) -> bool:
        """Hide the message for ``seconds``."""
        return self.keeper.settle(self, State.HIDE, due_at=self.keeper.clock() + seconds)

    def release(self) -> bool:
        """Let SQS show the message again immediately. This receive counts as an attempt.

        Use :meth:`give_back` if the task was not started.
        """
        return self.keeper.settle(self, State.GIVE_BACK, due_at=self.keeper.clock())

    def give_back(self, *, until: float | None = None, was_due: bool = False) -> bool:
        """Let SQS show the message again. This receive does not count as an attempt.

        Use :meth:`release` if the task was started.

        Arguments:
            until: hide it until this time of the keeper's clock. ``None``: show it immediately.
            was_due: whether only its provider kept the message from running. If so, the wait for
                the provider counts against ``retry_for``.
        """
        if self.state is State.HELD:  # else this call has no effect
            due_since = self.delivery.first_due_at if was_due else None
            self.keeper.memory.count_given_back(self.message_id, due_since=due_since)
        if until is not None:
            return self.keeper.settle(self, State.HIDE, due_at=until)
        return self.release()

    def give_up(self, error: ErrorText, **facts: Any) -> bool:
        """Send the message to the queue's dead-letter queue, with a record of the reason.

        Arguments:
            error: the error of the last run.
            facts: the other fields of the record.
        """
        record = DeadLetterRecord(
            **asdict(error),
            **facts,
            first_received_at=self.delivery.first_received_at,
            failed_at=time.time(),
            origin=self.queue.arn or self.queue.url,
        )
        return self.dead_letter(record)

    def dead_letter(self, record: DeadLetterRecord) -> bool:
        """Send the message, with the record on it, to the queue's dead-letter queue.

        If the queue's attributes are not read yet, the worker renews the message until they are.
        """
        return self.keeper.settle(self, State.DEAD_LETTER, record=record)

    def lose(self) -> None:
        """Stop the calls for this message, because another worker may have it. Notify its task."""
        self.keeper.lose(self)

    # Transitions, under the keeper's lock

    def move(self, state: State, **facts: Any) -> None:
        """Go to another state that ``TRANSITIONS`` allows, and set the attributes in ``facts``."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        for name, value in facts.items():
            setattr(self, name, value)
        self.state = state

    def hold_again(self, newer: Lease) -> None:
        """Hold the message with the receipt handle of a newer receive of the same message."""
        if self.state is State.LOST:
            self.move(State.HELD)
        self.queue, self.handle, self.received_at = newer.queue, newer.handle, newer.received_at
        self.visible_at, self.renew_at = newer.visible_at, newer.renew_at
        # The run belongs to the first receive, so its facts stay. Add only the number of receives
        # since then.
        since = newer.delivery.receive_count - self.delivery.receive_count
        self.delivery = replace(self.delivery, receives_since=since)
        self.may_be_lost = self.in_doubt = False

    def shed(self) -> None:
        """Drop the message's content to save memory. Call this when no call to SQS needs it."""
        self.body, self.message, self.payload = "", {}, None
        self.handed_to_pool, self.on_lost, self.go_on = _no, None, None

    # The timeouts to ask for

    def extend(self, asked_at: float, seconds: int) -> None:
        """Note that the message is hidden for ``seconds`` from ``asked_at`` on."""
        self.visible_at = asked_at + seconds
        self.renew_at = asked_at + seconds * RENEW_AT_SHARE

    def may_be_visible(self, now: float) -> bool:
        """Return whether SQS may have shown the message to other workers.

        In this case, a call for this lease could change the visibility timeout of another worker.
        If an earlier call got no response (``in_doubt``), SQS may have hidden the message only
        until ``due_at``.
        """
        return self.may_be_lost or now >= self.visible_at or (self.in_doubt and now >= self.due_at)

    def seconds_to_hide(self, now: float) -> int:
        """Return the visibility timeout in seconds that a call for a state in ``HIDING`` asks for.

        With 0, SQS shows the message immediately. HIDE asks for 1 or more.
        """
        if self.state is State.GIVE_BACK:
            return 0
        least = 1 if self.state is State.HIDE else 0
        return max(least, min(math.ceil(self.due_at - now), self._seconds_left(now)))

    def seconds_to_renew(self, now: float, spread_seconds: int) -> int:
        """Return the visibility timeout in seconds that a renewal asks for.

        It is 0 or less if SQS has hidden the message for almost 12 hours, which is SQS's limit.

        Arguments:
            now: the time.
            spread_seconds: ask for at least this (:func:`.settlement.spread_seconds`).
        """
        least = self.queue.visibility_timeout_seconds
        seconds = max(least, _MIN_RENEWAL_SECONDS, spread_seconds)
        lasting = self.failures - _TRANSIENT_FAILURES
        if self.state is not State.HELD and lasting > 0:
            longer = _FIRST_KEEP_HIDDEN_SECONDS * 2 ** min(lasting - 1, 10)
            seconds = max(seconds, min(longer, _MAX_KEEP_HIDDEN_SECONDS))
        return min(seconds, self._seconds_left(now))

    def _seconds_left(self, now: float) -> int:
        """Return for how many more seconds SQS can hide the message. Its limit is 12 hours."""
        longest = MAX_VISIBILITY_TIMEOUT_SECONDS - TWELVE_HOURS_MARGIN_SECONDS
        return int(longest - (now - self.received_at))
