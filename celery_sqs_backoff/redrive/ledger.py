"""The ledger of one redrive: each message is in one state, and every number is a fold over it.

::

    (unknown) --received--> SEEN --start_sending--> SENDING --sent--> SENT --deleted--> DELETED
                             |  <---------unsent------'  |
                             |                           '--in_doubt--> IN_DOUBT --> SENDING, ASIDE
                             |--put_aside--> ASIDE         skipped, failed, poison, or held in doubt
                             |--came_back--> CAME_BACK     a message that this run itself has sent
                             |--dropped----> DELETED       deleted unsent, as was asked
                             '--released---> (unknown)     given back, or lost: it will come again

Pure: no I/O, no threads, times are passed in. One receipt handle owns a message: that of its newest
receive. Who holds an older one may not send it, and drops it; whoever has the newest goes on with
it. While a message is SENDING its sender stays in charge, and takes over a newer handle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from .past import Entry, Past

__all__ = ["LEFT", "Ledger", "Left", "Receipt", "Row", "State", "doubt_late", "numbers_of"]


class State(Enum):
    """Where a message is. Every message looked at is in exactly one."""

    SEEN = "seen"
    ASIDE = "put aside"
    SENDING = "sending"
    IN_DOUBT = "in doubt"
    SENT = "sent"
    DELETED = "deleted"
    CAME_BACK = "came back"


class Receipt(Enum):
    """What a receive of a message is to the ledger."""

    #: It has not been looked at yet; or it was, and whoever did so has just lost it.
    NEW = "new"
    #: It was looked at; nothing is to be done but to keep it hidden.
    KNOWN = "known"
    #: It was sent, by this run or one before: it only wants deleting.
    SENT_BEFORE = "sent before"
    #: The same, and SQS had accepted its delete.
    DELETED_BEFORE = "deleted before"


#: Why a message that was looked at is left in the source.
Left = Literal["skipped", "failed", "poison", "in_doubt"]
LEFT: tuple[Left, ...] = ("skipped", "failed", "poison", "in_doubt")

#: From which states a message may get into a state. ``None``: the ledger does not know it.
_MOVES: Mapping[State, tuple[State | None, ...]] = {
    State.SEEN: (None, State.SENDING),
    State.ASIDE: (State.SEEN, State.SENDING, State.IN_DOUBT),
    State.SENDING: (State.SEEN, State.IN_DOUBT),
    State.IN_DOUBT: (State.SENDING,),
    State.SENT: (None, State.SENDING, State.DELETED),
    State.DELETED: (State.SEEN, State.ASIDE, State.IN_DOUBT, State.SENT),
    State.CAME_BACK: (State.SEEN,),
}


@dataclass(slots=True)
class Row:
    """A message that is not settled. ``until``: hidden for us until then, by the run's clock."""

    state: State
    handle: str
    until: float
    left: Left | None = None
    doubted: bool = False


#: Ids of deleted messages that are remembered, should SQS show one once more.
_REMEMBERED = 10_000


class Ledger:
    """The states of all messages of one run.

    Arguments:
        past: what earlier processes have left. It is changed as messages turn up.
    """

    def __init__(self, past: Past | None = None) -> None:
        self.past = past or Past()
        self._past_at = self.past.last_at
        self.rows: dict[str, Row] = {}
        self.counts: Counter[State] = Counter()
        #: Left messages by why, dropped ones, and messages that were ever in doubt.
        self.left: Counter[str] = Counter()
        self.dropped = 0
        self.deleted = 0
        self.sent = 0
        self.sent_in_run = self.past.sent_in_run
        self._doubted: dict[str, float] = {}  # since when, seconds since the epoch
        self._done: set[int] = set()  # hashes of ids: 200,000 texts would take 20 MB
        self._order: deque[int] = deque()
        self._next_due = float("inf")

    # What is received

    def received(self, id_: str, handle: str, until: float) -> Receipt:
        """A message was received: from now on this handle owns it."""
        self._next_due = min(self._next_due, until)
        if (row := self.rows.get(id_)) is not None:
            row.handle, row.until = handle, until
            if row.state in (State.SEEN, State.IN_DOUBT):
                return Receipt.NEW
            return Receipt.SENT_BEFORE if row.state is State.SENT else Receipt.KNOWN
        if hash(id_) in self._done:
            self._done.discard(hash(id_))
            self.counts[State.DELETED] -= 1
            self.deleted -= 1
            self._enter(id_, State.SENT, handle, until)
            return Receipt.DELETED_BEFORE
        if id_ in self.past.sent:
            self._enter(id_, State.SENT, handle, until)
            return Receipt.SENT_BEFORE
        self._enter(id_, State.SEEN, handle, until)
        if id_ in self.past.in_doubt:
            self._doubt(id_)
        return Receipt.NEW

    def owns(self, id_: str, handle: str, now: float, margin: float) -> bool:
        """Whether this receive is the newest, and nobody else can have the message meanwhile."""
        return self.is_newest(id_, handle) and now < self.rows[id_].until - margin

    def is_newest(self, id_: str, handle: str) -> bool:
        """Whether the message is to be settled, and by who has this handle."""
        row = self.rows.get(id_)
        return row is not None and row.handle == handle

    def release(self, id_: str, handle: str) -> bool:
        """Forget a message that was not settled: it will be received again.

        Returns whether this handle owned it.
        """
        row = self.rows.get(id_)
        if row is None or row.handle != handle or row.state not in (State.SEEN, State.IN_DOUBT):
            return False
        if row.doubted:
            self.past.in_doubt.setdefault(id_, self._doubted[id_])
        del self.rows[id_]
        self.counts[row.state] -= 1
        return True

    # What is done

    def start_sending(self, ids: Iterable[str], at: float) -> Entry:
        found = tuple(ids)
        for id_ in found:
            self._move(id_, State.SENDING)
        self.past.last_at = max(self.past.last_at, at)
        return Entry("sending", found, at)

    def has_sent(self, ids: Iterable[str]) -> Entry:
        found = tuple(ids)
        for id_ in found:
            self._move(id_, State.SENT)
            self.past.in_doubt.pop(id_, None)
        self.sent += len(found)
        self.sent_in_run += len(found)
        return Entry("sent", found)

    def was_unsent(self, ids: Iterable[str]) -> Entry:
        """SQS did not take these. One that was ever in doubt stays so: an earlier try may have
        arrived."""
        found = tuple(ids)
        for id_ in found:
            self._move(id_, State.SEEN)
        return Entry("unsent", tuple(id_ for id_ in found if not self.rows[id_].doubted))

    def is_in_doubt(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The response was lost. Returns those that were not in doubt before."""
        found = tuple(ids)
        new = tuple(id_ for id_ in found if id_ not in self._doubted)
        for id_ in found:
            self._move(id_, State.IN_DOUBT)
            self._doubt(id_)
        return new

    def put_aside(self, ids: Iterable[str], left: Left) -> None:
        """Leave these in the source; they stay hidden until the end."""
        for id_ in ids:
            self._move(id_, State.ASIDE)
            self.rows[id_].left = left
            self.left[left] += 1

    def has_come_back(self, ids: Iterable[str]) -> None:
        """These were sent by this run, and are here again as new messages."""
        for id_ in ids:
            self._move(id_, State.CAME_BACK)

    def has_deleted(self, ids: Iterable[str]) -> Entry:
        """SQS has deleted these; those that were not sent are thereby dropped."""
        found = tuple(id_ for id_ in ids if id_ in self.rows)  # two threads may delete the same
        for id_ in found:
            row = self.rows[id_]
            self.dropped += row.state is not State.SENT
            if row.left is not None:
                self.left[row.left] -= 1
            self._move(id_, State.DELETED)
            self._forget(id_)
            self.deleted += 1
        return Entry("deleted", found)

    def settle_gone(self, before: float) -> Entry:
        """All of the source was looked at: what earlier processes left and is not there is gone."""
        gone = {id_ for id_ in (*self.past.in_doubt, *self.past.sent) if id_ not in self.rows}
        return self.past.settle(gone, self._past_at, before)

    # Holds

    def due(self, now: float, within: float) -> Iterator[tuple[str, Row]]:
        """Messages whose time to be hidden ends within so many seconds, and is not over."""
        if now + within < self._next_due:
            return
        self._next_due = float("inf")
        for id_, row in list(self.rows.items()):
            if row.until - now < within and row.state is not State.SENT:
                if now < row.until:
                    yield id_, row
            else:
                self._next_due = min(self._next_due, row.until)

    def renewed(self, id_: str, handle: str, until: float | None) -> None:
        """SQS hides a message longer; ``None``: it does not."""
        row = self.rows.get(id_)
        if row is not None and row.handle == handle:
            row.until = max(row.until, until) if until is not None else row.until
            self._next_due = min(self._next_due, row.until)

    def give_all_back(self) -> list[str]:
        """Receipt handles of all that is hidden for us and was not sent. They count as they are."""
        held = [row for row in self.rows.values() if row.state is not State.SENT]
        handles = [row.handle for row in held if row.until > float("-inf")]
        for row in held:
            row.until = float("-inf")
        return handles

    # Numbers

    @property
    def looked_at(self) -> int:
        """Distinct messages, those that came back included."""
        return sum(self.counts.values())

    @property
    def places(self) -> int:
        """Messages of the source as it was: without those that this run itself brought there."""
        return self.looked_at - self.counts[State.CAME_BACK]

    @property
    def waiting(self) -> int:
        """Messages that are held to be sent."""
        return self.counts[State.SEEN] + self.counts[State.SENDING] + self.counts[State.IN_DOUBT]

    @property
    def hidden(self) -> int:
        """Messages in the source that are hidden for this run, for certain: of those that were
        sent SQS may have lost no more than the answer to their delete."""
        return len(self.rows) - self.counts[State.SENT]

    @property
    def undeleted(self) -> list[tuple[str, str]]:
        """Sent, and still in the source: id and receipt handle."""
        return [(id_, r.handle) for id_, r in self.rows.items() if r.state is State.SENT]

    @property
    def in_doubt(self) -> int:
        """Messages that may have been sent more than once, or of which nobody knows."""
        return len(self._doubted.keys() | self.past.in_doubt.keys())

    def settle_doubt(self, ids: Sequence[str], since: float) -> tuple[str, ...]:
        """A FIFO queue recognises what was first sent after ``since``: those are sent once, for
        certain. Returns the others that are in doubt."""
        left = tuple(id_ for id_ in ids if self._doubted.get(id_, since) < since)
        for id_ in set(ids).difference(left):
            self._doubted.pop(id_, None)
            self.rows[id_].doubted = False
        return left

    def doubted_since(self, id_: str) -> float | None:
        """When it was first sent without an answer, seconds since the epoch; ``None``: never."""
        return self._doubted.get(id_, self.past.in_doubt.get(id_))

    # Moving

    def _enter(self, id_: str, state: State, handle: str, until: float) -> None:
        if None not in _MOVES[state]:
            raise ValueError(f"a message cannot begin as {state.value}")
        self.rows[id_] = Row(state, handle, until)
        self.counts[state] += 1

    def _move(self, id_: str, state: State) -> None:
        row = self.rows[id_]
        if row.state not in _MOVES[state]:
            raise ValueError(f"a message that is {row.state.value} cannot become {state.value}")
        self.counts[row.state] -= 1
        self.counts[state] += 1
        row.state = state

    def _doubt(self, id_: str) -> None:
        self.rows[id_].doubted = True
        self._doubted.setdefault(id_, self.past.in_doubt.get(id_, self.past.last_at))

    def _forget(self, id_: str) -> None:
        del self.rows[id_]
        self.past.sent.discard(id_)
        self.past.in_doubt.pop(id_, None)
        self._done.add(hash(id_))
        self._order.append(hash(id_))
        if len(self._order) > _REMEMBERED:
            self._done.discard(self._order.popleft())


def doubt_late(ledger: Ledger, ids: Iterable[str], now: float) -> tuple[str, ...]:
    """These are deleted. Returns those that somebody else may have received and sent before that:
    they were sent, and their time to be hidden was over. Those are in doubt."""
    known = [(id_, row) for id_ in ids if (row := ledger.rows.get(id_)) is not None]
    sent = [(id_, row) for id_, row in known if row.state is State.SENT and not row.doubted]
    late = tuple(id_ for id_, row in sent if row.until <= now)
    for id_ in late:
        ledger._doubt(id_)
    return late


def numbers_of(ledger: Ledger) -> dict[str, Any]:
    """The fields of a report that are folds over a ledger."""
    returned = ledger.counts[State.CAME_BACK]
    return {
        "sent": ledger.sent,
        "deleted": ledger.deleted,
        "dropped": ledger.dropped,
        "failed": ledger.left["failed"],
        "skipped": ledger.left["skipped"],
        "poison": ledger.left["poison"] + returned,
        "returned": returned,
        "in_doubt": ledger.in_doubt,
        "not_deleted": ledger.counts[State.SENT],
        "looked_at": ledger.places + returned,
    }
