"""The ledger of a run that is under way: its lock, its log on disk, and its events.

Each method is one transition. It changes the ledger, writes the journal and tells ``on_event``, in
this order; what must not happen before the journal has it (a send) waits for the method to return.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .events import (
    Deleted,
    Event,
    Failed,
    InDoubt,
    NotDeleted,
    Poison,
    Progress,
    Sent,
    Skipped,
)
from .journal import NoJournal
from .ledger import Ledger, Left, Receipt, doubt_late, numbers_of
from .listener import Listener
from .message import DeadLetter
from .past import Entry
from .triage import CAME_BACK, UNKNOWN, Action, Disposition

__all__ = ["Book", "name_late"]

#: The speed that is told is that of the last so many seconds.
_WINDOW_SECONDS = 5.0

#: A message is not sent when so little of its time is left: 2 s of 30.
_MARGIN_SHARE = 1 / 15
_MOST_MARGIN_SECONDS = 2.0

_LEFT: dict[Action, tuple[Left, Callable[[tuple[str, ...], str], Event]]] = {
    Action.SKIP: ("skipped", Skipped),
    Action.FAIL: ("failed", Failed),
    Action.POISON: ("poison", Poison),
}

#: Task names that are counted one by one; the others together.
_MOST_TASKS = 1_000


class Throughput:
    """How fast a counter has grown lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    def per_second(self, done: int) -> float:
        now = self._clock()
        while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW_SECONDS:
            self._marks.popleft()
        since, before = self._marks[0]
        if now - self._marks[-1][0] >= 0.5:
            self._marks.append((now, done))
        return (done - before) / max(0.1, now - since)


class Book:
    """Safe for threads.

    Arguments:
        journal: the log on disk; what it knows of earlier processes is the ledger's past.
        on_event: is called with one event at a time. (A journal that cannot be written sets
            :attr:`file_error`.)
        clock: seconds; goes on while the machine sleeps.
    """

    def __init__(
        self,
        journal: NoJournal,
        on_event: Callable[[Event], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.lock = threading.RLock()
        self.ledger = Ledger(journal.past)
        self.tell = Listener(on_event)
        self.file_error: OSError | None = None
        self.by_task: Counter[str] = Counter()
        self.admitted = 0
        self.unknown = 0
        self.claims = 0
        self._journal = journal
        self._clock = clock
        self._throughput = Throughput(clock)

    # Receiving

    def claim(self, most: int, *, places: int, limit: int | None) -> int:
        """Reserve places for what is received next; 0: all there may be are taken."""
        with self.lock:
            claim = min(most, self.room(places=places, limit=limit))
            self.claims += claim
            return claim

    def room(self, *, places: int, limit: int | None) -> int:
        """How many messages may be received yet; 0 from the limit of those to be sent on."""
        with self.lock:
            is_reached = limit is not None and self.admitted >= limit
            return 0 if is_reached else max(0, places - self.ledger.places - self.claims)

    def received(
        self, claim: int, messages: Sequence[DeadLetter], until: float
    ) -> dict[Receipt, list[DeadLetter]]:
        """Enter what was received for a claim, which ends.

        SQS may accept a delete with an older handle and not do it. The last line of the journal
        must not be "deleted" then: should this run die, the next one would send the message again.
        """
        found: dict[Receipt, list[DeadLetter]] = defaultdict(list)
        with self.lock:
            self.claims -= claim
            for message in messages:
                found[self.ledger.received(message.id, message.handle, until)].append(message)
        if again := found.pop(Receipt.DELETED_BEFORE, None):
            self._write(Entry("sent", tuple(message.id for message in again)))
            found[Receipt.SENT_BEFORE] += again
        return found

    def admit(self, messages: int, limit: int | None) -> int:
        """How many of these may be sent, by the limit."""
        with self.lock:
            room = messages if limit is None else max(0, min(messages, limit - self.admitted))
            self.admitted += room
            return room

    def share(self) -> float:
        """Of the messages looked at, how many are to be sent (or dropped); 1 before the first."""
        with self.lock:
            places = self.ledger.places
            return self.admitted / places if places else 1.0

    def release(self, messages: Sequence[DeadLetter], *, admitted: bool) -> list[str]:
        """These are not settled: they come again (their handles are returned), or are received."""
        with self.lock:
            if admitted:
                self.admitted -= len(messages)
            return [m.handle for m in messages if self.ledger.release(m.id, m.handle)]

    def keep_ours(self, messages: Sequence[DeadLetter], hold_seconds: float) -> list[DeadLetter]:
        """Release those that may be visible by now, or were received again; return the others."""
        margin = min(_MOST_MARGIN_SECONDS, hold_seconds * _MARGIN_SHARE)
        with self.lock:
            now = self._clock()
            ours = [m for m in messages if self.ledger.owns(m.id, m.handle, now, margin)]
            self.release([m for m in messages if m not in ours], admitted=True)
            return ours

    # Settling

    def leave(self, found: Sequence[tuple[DeadLetter, Disposition[Any]]]) -> int:
        """Put messages aside, each for its reason. Returns how many of them came back."""
        grouped: dict[tuple[Action, str], list[str]] = defaultdict(list)
        with self.lock:
            for message, disposition in found:
                if self.ledger.is_newest(message.id, message.handle):
                    grouped[disposition.action, disposition.reason].append(message.id)
            for (action, reason), ids in grouped.items():
                if action is Action.CAME_BACK:
                    self.ledger.has_come_back(ids)
                    self.tell(Poison(tuple(ids), CAME_BACK))
                elif action is Action.HOLD:
                    self.ledger.put_aside(ids, "in_doubt")  # named before
                else:
                    left, event = _LEFT[action]
                    self.ledger.put_aside(ids, left)
                    self.unknown += len(ids) if reason == UNKNOWN else 0
                    self.tell(event(tuple(ids), reason))
        return sum(len(ids) for (action, _), ids in grouped.items() if action is Action.CAME_BACK)

    def fail(self, messages: Sequence[DeadLetter], reason: str) -> None:
        self.leave([(message, Disposition(Action.FAIL, reason)) for message in messages])

    def start_sending(
        self, messages: Sequence[DeadLetter], at: float, hold_seconds: float
    ) -> list[DeadLetter]:
        """Begin to send those that are still ours, and return them. On return it is on the disk.

        Raises:
            OSError: it cannot be written; then nothing has changed.
        """
        with self.lock:
            ours = self.keep_ours(messages, hold_seconds)
            entry = self.ledger.start_sending([message.id for message in ours], at)
        try:
            self._journal.write(entry)
        except BaseException:  # a kill, too: what is not in the journal must not be sent
            with self.lock:
                self._take_over(ours)
                self.ledger.was_unsent(entry.ids)
            raise
        return ours

    def has_sent(
        self, messages: Sequence[DeadLetter], destination: str, *, recognised: float | None = None
    ) -> None:
        """Never raises: what SQS has accepted is to be deleted whatever happens here.
        ``recognised``: FIFO; SQS makes no duplicate of what was first sent since."""
        ids = tuple(message.id for message in messages)
        with self.lock:
            self._take_over(messages)
            entry = self.ledger.has_sent(ids)
            if recognised is not None and (twice := self.ledger.settle_doubt(ids, recognised)):
                self.tell(InDoubt(twice, resend=True))
            for message in messages:
                self._count(message)
        self._write(entry)
        self.tell(Sent(ids, destination))

    def was_unsent(self, messages: Sequence[DeadLetter]) -> None:
        with self.lock:
            self._take_over(messages)
            entry = self.ledger.was_unsent(message.id for message in messages)
        self._write(entry)

    def is_in_doubt(self, messages: Sequence[DeadLetter], *, resend: bool, is_fifo: bool) -> None:
        """The response was lost. On FIFO that is nothing to tell of: the next one settles it."""
        with self.lock:
            self._take_over(messages)
            new = self.ledger.is_in_doubt(message.id for message in messages)
            if new and not is_fifo:
                self.tell(InDoubt(new, resend))

    def name_doubted(self, messages: Sequence[DeadLetter]) -> None:
        """Name those that may have been sent, and are given up."""
        with self.lock:
            if ids := tuple(m.id for m in messages if self.ledger.doubted_since(m.id) is not None):
                self.tell(InDoubt(ids, resend=False))

    def has_deleted(self, ids: Sequence[str], dropped: Sequence[DeadLetter] = ()) -> None:
        with self.lock:
            entry = self.ledger.has_deleted(ids)
            for message in dropped:
                if message.id in entry.ids:
                    self._count(message)
        self._write(entry)
        if entry.ids:
            self.tell(Deleted(entry.ids))

    def name_past_in_doubt(self, *, resend: bool) -> None:
        """Name what an earlier process left in doubt."""
        if ids := tuple(self.ledger.past.in_doubt):
            self.tell(InDoubt(ids, resend))

    def name_undeleted(self, reason: str) -> None:
        if ids := tuple(id_ for id_, _ in self.undeleted()):
            self.tell(NotDeleted(ids, reason))

    def undeleted(self) -> list[tuple[str, str]]:
        with self.lock:
            return self.ledger.undeleted

    # Ending

    def settle_gone(self, before: float) -> None:
        with self.lock:
            entry = self.ledger.settle_gone(before)
        self._write(entry)

    def end(self) -> None:
        """The run knows of all its messages: the next one is a new run, not this one resumed."""
        self._write(Entry("ended"))

    # Telling

    @property
    def per_second(self) -> float:
        """Messages sent or dropped per second, lately."""
        with self.lock:
            return self._throughput.per_second(self.ledger.sent + self.ledger.dropped)

    def tell_progress(self, places: int, limit: int | None) -> None:
        rate = self.per_second
        with self.lock:
            event = _progress(self, places, limit, rate)
        self.tell(event)

    @property
    def error(self) -> BaseException | None:
        """What ``on_event`` raised, if it did."""
        return self.tell.error

    def _take_over(self, messages: Iterable[DeadLetter]) -> None:
        """Whoever received a message again while it was being sent has left it to its sender."""
        for message in messages:
            message.handle = self.ledger.rows[message.id].handle

    def _write(self, entry: Entry) -> None:
        try:
            self._journal.write(entry)
        except OSError as exc:
            with self.lock:
                self.file_error = self.file_error or exc

    def _count(self, message: DeadLetter) -> None:
        task = message.task or "(no Celery message)"
        known = task in self.by_task or len(self.by_task) < _MOST_TASKS
        self.by_task[task[:200] if known else "(others)"] += 1


def name_late(book: Book, ids: Sequence[str]) -> None:
    """Name what another run may have sent before SQS has deleted it for this one."""
    with book.lock:
        if late := doubt_late(book.ledger, ids, book._clock()):
            book.tell(InDoubt(late, resend=None))


def _progress(book: Book, places: int, limit: int | None, rate: float) -> Progress:
    ledger = book.ledger
    unseen = max(0, places - ledger.places)
    done = ledger.sent + ledger.dropped
    to_send = book.admitted + round(unseen * book.share())
    to_send = max(done, to_send if limit is None else min(limit, to_send))
    numbers = numbers_of(ledger)
    return Progress(
        looked_at=ledger.places,
        messages=places,
        sent=numbers["sent"],
        failed=numbers["failed"],
        skipped=numbers["skipped"],
        poison=numbers["poison"],
        returned=numbers["returned"],
        to_send=to_send,
        rate=rate,
        eta_seconds=(to_send - done) / rate if rate else None,
        dropped=ledger.dropped,
    )
