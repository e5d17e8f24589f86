"""What a received message is to become, and what each response of SQS makes of that: pure.

A message that was received is one :class:`Row`. It is held until somebody settles it; then calls
are made until SQS has agreed, or can no longer be asked. :data:`TRANSITIONS` says what each
response means. When a call is made is decided in ``table``; who makes it, elsewhere.
Nothing in here does I/O, starts threads, or knows of Celery: the worker and the redrive share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from ..dead_letter import DeadLetterRecord
from ..errors import NOT_LISTED, Failure, Kind
from ..limits import MAX_BATCH_ENTRIES, MAX_VISIBILITY_TIMEOUT_SECONDS, MAX_WAIT_TIME_SECONDS

#: A renewal asks for at least this much, however short the queue's own visibility timeout is: it
#: bounds the calls, and the time that a message of a killed worker stays hidden.
_MIN_RENEWAL_SECONDS = 10

#: SQS counts its 12 hours from before the message was seen here: the long poll, and some network.
_TWELVE_HOURS_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 40

#: Whoever asks for a delay has kept the margin above; here it must not be cut once more.
_HIDING_MARGIN_SECONDS = MAX_WAIT_TIME_SECONDS + 20

#: A renewal comes when this share of the visibility timeout is over: two more tries fit behind it.
_RENEW_AT_SHARE = 1 / 3

#: With many messages held, each renewal asks for longer, so that one queue needs no more than so
#: many renewal calls a second, and never for longer than this because of it.
_RENEWALS_PER_SECOND = 20
_MAX_SPREAD_SECONDS = 900

#: A message whose delete or dead letter fails so many times stays hidden, for longer each time. Not
#: sooner: after a transient failure it must be back soon if the worker is killed.
_TRANSIENT_FAILURES = 3
_FIRST_KEEP_HIDDEN_SECONDS = 30
_MAX_KEEP_HIDDEN_SECONDS = 900

#: A queue whose own visibility timeout is 0 would hand a message out again at once: whoever
#: receives from it must ask for this instead.
_INSTEAD_OF_NO_TIMEOUT_SECONDS = 30


class Want(Enum):
    """What is to become of a message. ``HELD`` is the only one that can be settled."""

    HELD = "held"
    DELETE = "delete"
    HIDE = "hide until it is due"
    GIVE_BACK = "show it now"
    DEAD_LETTER = "send it to the dead-letter queue, then delete it"
    LOST = "nothing: SQS no longer honours the receipt handle"


class Purpose(Enum):
    """What one entry of a call is for."""

    RENEW = "renew"
    HIDE = "hide"
    GIVE_BACK = "give back"
    DELETE = "delete"
    SEND = "send"


class Meaning(Enum):
    """What a response says, as far as a settlement has to know."""

    DONE = "SQS agrees"
    VOID = "the receipt handle is void"
    TOO_LONG = "the message would be hidden for more than 12 hours"
    UNFIT = "this entry cannot be sent as it is"
    REFUSED = "a person has to act"
    IN_DOUBT = "SQS may have done it"
    LATER = "SQS has not done it"


class Step(Enum):
    """What becomes of a row."""

    EXTEND = "it is hidden for as long as was asked"
    FINISH = "it is settled: the row ends"
    SENT = "its dead letter is there: delete it"
    LOSE = "hands off; whoever runs it is told"
    DROP = "it cannot be settled any more: the row ends, with a warning"
    SHORTEN = "ask again, for half as long; when that is nothing, after a pause"
    PLAIN = "try again without the record"
    REFUSE = "try again after a long pause; say so"
    DOUBT = "try again after a pause, as long as repeating does no harm"
    RETRY = "try again after a pause"


_CHANGE = {
    Meaning.DONE: Step.FINISH,
    Meaning.VOID: Step.DROP,
    Meaning.TOO_LONG: Step.SHORTEN,
    Meaning.UNFIT: Step.REFUSE,
    Meaning.REFUSED: Step.REFUSE,
    Meaning.IN_DOUBT: Step.DOUBT,
    Meaning.LATER: Step.RETRY,
}

#: What a response to an entry makes of its row.
TRANSITIONS: Mapping[Purpose, Mapping[Meaning, Step]] = {
    Purpose.RENEW: {
        **_CHANGE,
        Meaning.DONE: Step.EXTEND,
        Meaning.VOID: Step.LOSE,
        Meaning.IN_DOUBT: Step.RETRY,  # twice extended is extended
    },
    Purpose.HIDE: _CHANGE,
    Purpose.GIVE_BACK: _CHANGE,
    Purpose.DELETE: {
        **_CHANGE,
        Meaning.TOO_LONG: Step.DROP,
    },
    Purpose.SEND: {
        **_CHANGE,
        Meaning.DONE: Step.SENT,
        Meaning.VOID: Step.REFUSE,
        Meaning.TOO_LONG: Step.REFUSE,
        Meaning.UNFIT: Step.PLAIN,
        Meaning.IN_DOUBT: Step.RETRY,  # a second copy is better than none
    },
}

_MEANINGS: Mapping[Kind, Meaning] = {
    Kind.THROTTLED: Meaning.LATER,
    Kind.UNREACHABLE: Meaning.LATER,
    Kind.CREDENTIALS: Meaning.LATER,
    Kind.CREDENTIALS_LATE: Meaning.LATER,
    Kind.IN_DOUBT: Meaning.IN_DOUBT,
    Kind.DENIED: Meaning.REFUSED,
    Kind.NO_QUEUE: Meaning.REFUSED,
    Kind.UNSUPPORTED: Meaning.REFUSED,
    Kind.LOCAL: Meaning.REFUSED,
    Kind.STALE_HANDLE: Meaning.VOID,
    Kind.TOO_LONG: Meaning.TOO_LONG,
    Kind.BAD_ENTRY: Meaning.UNFIT,
}


def meaning_of(failure: Failure | None) -> Meaning:
    """Say what the result of an entry means; ``None`` is success."""
    if failure is None:
        return Meaning.DONE
    if failure.kind is Kind.IN_DOUBT and not failure.is_of_call and failure is not NOT_LISTED:
        return Meaning.LATER  # SQS has responded, and says that it failed at this entry
    return _MEANINGS[failure.kind]


def spread_seconds(held: int) -> int:
    """How long each of so many messages of a queue must be hidden, for few renewals a second."""
    seconds = held / _RENEW_AT_SHARE / MAX_BATCH_ENTRIES / _RENEWALS_PER_SECOND
    return min(math.ceil(seconds), _MAX_SPREAD_SECONDS)


class QueueFacts(Protocol):
    """What a settlement needs to know about a queue. ``dlq_url``: ``None`` = it has none."""

    @property
    def url(self) -> str: ...
    @property
    def visibility_timeout_seconds(self) -> int: ...
    @property
    def dlq_url(self) -> str | None: ...
    @property
    def is_fifo(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Content:
    """What a dead letter takes over from its message, as ReceiveMessage returned it."""

    body: str
    attributes: Mapping[str, Mapping[str, Any]]
    group_id: str | None
    #: AWS X-Ray's, a system attribute.
    trace_header: str | None = None


@dataclass(slots=True, eq=False)
class Row:
    """One received message, and what is known and wanted of it. Times are of one clock, seconds.

    Arguments:
        queue: where it was received.
        message_id: its id there.
        handle: the newest receipt handle.
        received_at: when it was received.
        guard: held while the row is settled, if several threads may try.
        owner: for whoever made the row; not looked at here.
        hidden_seconds: what the receive asked for; ``None``: the queue's visibility timeout.
    """

    queue: QueueFacts
    message_id: str
    handle: str
    received_at: float
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    owner: Any = None
    hidden_seconds: int | None = None
    want: Want = Want.HELD
    #: The table knows what is wanted. (``become`` does not wait for the table.)
    is_settled: bool = False
    visible_at: float = 0.0
    renew_at: float = 0.0
    #: HIDE, GIVE_BACK: when the message is to be seen again.
    due_at: float = 0.0
    #: DEAD_LETTER: the message, and why.
    content: Content | None = None
    record: DeadLetterRecord | None = None
    letter_bytes: int = 0
    is_sent: bool = False
    without_record: bool = False
    #: HIDE: from which share of the queue's quota in flight on the message is not hidden but made a
    #: dead letter (``None``: never), and what makes the record, of the seconds left to wait.
    park_above: float | None = None
    park: Callable[[float], DeadLetterRecord] | None = None
    is_parked: bool = False
    #: Its visibility timeout has run out unrenewed: a standard queue still takes the receipt
    #: handle then, and applies it to whoever has the message by now.
    may_be_lost: bool = False
    #: HIDE, GIVE_BACK, DELETE: SQS may have been asked, but its response was lost.
    in_doubt: bool = False
    #: The run has ended after the message was lost: a new receive is a new row.
    is_over: bool = False
    failures: int = 0
    #: SQS refused a whole batch for one of its entries: this row goes alone from now on.
    goes_alone: bool = False
    #: After "too long": the most to ask for.
    longest_seconds: int = MAX_VISIBILITY_TIMEOUT_SECONDS
    #: Where the row stands in the agendas of its queue; for the table.
    visibility_ticket: Any = None
    removal_ticket: Any = None
    expiry_ticket: Any = None

    def __post_init__(self) -> None:
        self.due_at = self.received_at
        self.extend(
            self.received_at,
            self.hidden_seconds
            or self.queue.visibility_timeout_seconds
            or _INSTEAD_OF_NO_TIMEOUT_SECONDS,
        )

    @property
    def is_hiding(self) -> bool:
        """Whether its settlement is a change of visibility, so that it is not renewed."""
        return self.is_settled and self.want in (Want.HIDE, Want.GIVE_BACK)

    @property
    def is_being_deleted(self) -> bool:
        """Whether its delete is under way."""
        return self._is_to_be_deleted and self.removal_ticket is None

    @property
    def _is_to_be_deleted(self) -> bool:
        return self.want is Want.DELETE or (self.want is Want.DEAD_LETTER and self.is_sent)

    @property
    def key(self) -> tuple[str, str]:
        return self.queue.url, self.message_id

    def become(self, want: Want, **facts: Any) -> bool:
        """Settle the row, or lose it. The first who asks wins; return whether that was this one."""
        with self.guard:
            if self.want is not Want.HELD:
                return False
            self._put(want, facts)
        return True

    def end_run(self, want: Want, **facts: Any) -> Want | None:
        """Settle the row at the end of its run; of a lost one, note that its run is over.

        Returns:
            What the row was: ``HELD`` = this has settled it; ``LOST`` = its run has ended now;
            ``None`` = somebody else was first, and nothing has changed.
        """
        with self.guard:
            was = self.want
            if was is Want.HELD:
                self._put(want, facts)
            elif was is Want.LOST and not self.is_over:
                self.is_over = True
            else:
                return None
        return was

    def _put(self, want: Want, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            setattr(self, name, value)
        self.want = want

    def hold_again(self, newer: Row) -> None:
        """Go on with the handle of a newer receive of the same message."""
        with self.guard:
            if self.want is Want.LOST:
                self.want = Want.HELD
            self.queue, self.handle, self.received_at = newer.queue, newer.handle, newer.received_at
            self.visible_at, self.renew_at = newer.visible_at, newer.renew_at
            self.longest_seconds = MAX_VISIBILITY_TIMEOUT_SECONDS
            self.may_be_lost = self.in_doubt = False

    def extend(self, asked_at: float, seconds: int) -> None:
        """Note that the message is hidden for ``seconds`` from ``asked_at`` on."""
        self.visible_at = asked_at + seconds
        self.renew_at = asked_at + seconds * _RENEW_AT_SHARE

    def may_be_visible(self, now: float) -> bool:
        """Whether somebody else may have the message, whose hold a change would end or extend.

        So it is, too, when an earlier try may have shown it, or hidden it until a time that is
        past. If that try did nothing, the message comes back when its visibility timeout ends.
        """
        return self.may_be_lost or now >= self.visible_at or (self.in_doubt and now >= self.due_at)

    def is_surely_deleted(self, now: float) -> bool:
        """Whether a receipt handle that is void now means that our own delete was carried out.

        Its response was lost, and the hold has never ended, so nobody else has the message.
        """
        is_held = now < self.visible_at and not self.may_be_lost
        return self.in_doubt and self.is_settled and self._is_to_be_deleted and is_held

    def seconds_to_hide(self, now: float) -> int:
        """What to ask SQS for at a settlement: at least 1 for a delay, 0 to show it now."""
        if self.want is Want.GIVE_BACK:
            return 0
        most = self._most(now, _HIDING_MARGIN_SECONDS)
        return max(1, min(math.ceil(self.due_at - now), most))

    def seconds_to_renew(self, now: float, held: int) -> int:
        """What to ask SQS for at a renewal; 0 or less when the 12 hours are used up.

        Arguments:
            now: the time.
            held: messages of the queue that need renewals.
        """
        seconds = max(
            self.queue.visibility_timeout_seconds, _MIN_RENEWAL_SECONDS, spread_seconds(held)
        )
        lasting = self.failures - _TRANSIENT_FAILURES
        if self.want is not Want.HELD and lasting > 0:
            longer = _FIRST_KEEP_HIDDEN_SECONDS * 2 ** min(lasting, 10)
            seconds = max(seconds, min(longer, _MAX_KEEP_HIDDEN_SECONDS))
        return min(seconds, self._most(now, _TWELVE_HOURS_MARGIN_SECONDS))

    def _most(self, now: float, margin: float) -> int:
        held = now - self.received_at
        left = int(MAX_VISIBILITY_TIMEOUT_SECONDS - margin - held)
        return min(left, self.longest_seconds)
