"""Keep the state of each message of a redrive, in one table under one lock.

A receive hides a message from other consumers for some seconds (its visibility timeout), and the
run can renew this time. The hidden time is the *hold* of the message. A message is *in doubt* if it
may have been sent, because SQS's response to a send was lost. Each message has a row in the table.
A received message is HELD, and methods change its state::

    HELD --start_sending--> SENDING --mark_sent--> SENT --mark_deleted--> forgotten
     |  <---mark_unsent, mark_in_doubt---'                                 ^
     |--leave--> LEFT    stays hidden until the run ends, and is then shown again
     |--release-> forgotten: the run will receive it again                 |
     '--mark_deleted (unsent, by the option ``delete``) -------------------'

A method changes the rows, writes the journal and emits an event, in this order. The run uses only
the newest receipt handle of a message. If another thread receives the message again during SENDING,
the sending thread continues with the newer handle. A row has no receipt handle if this run does not
hold the message: the row is from the journal, or the message is in doubt and was released.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import events
from .files import NoJournal
from .message import DlqMessage
from .triage import UNKNOWN, Action

#: The event to emit for messages that stay in the source. ``Action.HOLD`` has no entry, because an
#: ``InDoubt`` event has already named these messages.
_EVENTS: dict[Action, Callable[[tuple[str, ...], str], events.RedriveEvent]] = {
    Action.SKIP: events.Skipped,
    Action.FAIL: events.Failed,
    Action.POISON: events.Poison,
    Action.CAME_BACK: events.Poison,
}

#: The run sends a message only if the rest of its hold is longer than a margin. The margin is this
#: share of a hold (2 s of 30 s), and at most ``_MOST_MARGIN_SECONDS``.
_MARGIN_SHARE = 1 / 15
_MOST_MARGIN_SECONDS = 2.0

#: The ledger remembers this number of deleted messages, because SQS may deliver them again.
_REMEMBERED = 10_000


class RowState(Enum):
    HELD = "held"
    SENDING = "sending"
    SENT = "sent"
    LEFT = "left"


@dataclass(slots=True)
class LedgerRow:
    """The state of one message that SQS has not deleted.

    Attributes:
        handle: its newest receipt handle; ``None`` = this process does not hold the message.
        until: time at which SQS stops hiding it, by the run's clock.
        left: why it stays in the source, such as ``Action.SKIP``; ``None`` = it is not LEFT.
        doubted_at: start of the first send that SQS did not answer, in seconds since the epoch;
            ``None`` = the message is not in doubt. ``_doubt_late`` and ``name_unanswered``
            store a time of the run's clock. It only shows that the message is in doubt.
    """

    state: RowState
    handle: str | None = None
    until: float = float("-inf")
    left: Action | None = None
    doubted_at: float | None = None


class Ledger:
    """The state of each message of a run, and the counts for its report. Safe for threads.

    Arguments:
        journal: names the messages that earlier runs have left in doubt or not deleted.
        on_event: is called with one event at a time.
        clock: returns monotonic seconds. It also runs while the machine is suspended.
        hold_seconds: seconds for which a receive hides a message.

    Attributes:
        looked_at: number of distinct messages that were received.
        admitted: number of messages that were chosen to be sent or deleted.
        claims: number of messages that the receives under way may return (see ``claim``).
        file_error: the first error of a write to the journal; ``None`` = all writes worked.
    """

    def __init__(
        self,
        journal: NoJournal,
        on_event: Callable[[events.RedriveEvent], None] | None,
        clock: Callable[[], float],
        hold_seconds: float,
    ) -> None:
        self.lock = threading.RLock()
        self.emit = events.Listener(on_event)
        self.file_error: OSError | None = None
        self.rows: dict[str, LedgerRow] = {}
        self.left: Counter[Action] = Counter()
        self.looked_at = self.admitted = self.claims = 0
        self.sent = self.deleted = self.dropped = self.unknown = 0
        self._doubted = 0  # number of deleted messages that were in doubt
        self._gone: dict[str, None] = {}
        self._journal, self._clock, self._began = journal, clock, clock()
        self._margin = min(_MOST_MARGIN_SECONDS, hold_seconds * _MARGIN_SHARE)
        for id_, at in journal.past.items():
            self.rows[id_] = LedgerRow(
                RowState.SENT if at is None else RowState.HELD, doubted_at=at
            )

    # Receiving

    def claim(self, most: int, places: int) -> int | None:
        """Reserve places for the messages of one receive, and return the number of places.

        A run looks at a limited number of messages. Each message takes one place. Return ``None``
        if all places are taken or reserved.

        Arguments:
            most: largest number to return.
            places: number of messages that the run may look at.
        """
        with self.lock:
            claim = min(most, places - self.places - self.claims)
            if claim < 1:
                return None
            self.claims += claim
            return claim

    def enter(
        self, claim: int, messages: Sequence[DlqMessage], until: float
    ) -> tuple[list[DlqMessage], list[DlqMessage]]:
        """Record the messages that a receive returned.

        Return the messages that were not sent yet, and the messages that were sent before and only
        have to be deleted. Messages in the states SENDING and LEFT are not returned.

        Arguments:
            claim: number that ``claim()`` returned for this receive.
            until: time at which SQS stops hiding the messages, by the run's clock.
        """
        ours: list[DlqMessage] = []
        sent: list[DlqMessage] = []
        again: list[str] = []
        with self.lock:
            self.claims -= claim
            for message in messages:
                row = self.rows.get(message.id)
                if row is None and message.id in self._gone:
                    # SQS may accept a delete with an older handle, but keep the message. So the
                    # caller deletes the message again.
                    row = self.rows[message.id] = LedgerRow(RowState.SENT)
                    del self._gone[message.id]
                    self.deleted -= 1
                    self.looked_at -= 1
                    again.append(message.id)
                elif row is None:
                    row = self.rows[message.id] = LedgerRow(RowState.HELD)
                self.looked_at += row.handle is None
                row.handle, row.until = message.handle, until
                if row.state is RowState.HELD:
                    ours.append(message)
                elif row.state is RowState.SENT:
                    sent.append(message)
        self._write("sent", again)
        return ours, sent

    def admit(self, messages: Sequence[DlqMessage], limit: int | None) -> list[DlqMessage]:
        """Return the messages that the limit of the run still allows, and count them as admitted.

        ``limit``: largest number of admitted messages in the whole run; ``None`` = no limit.
        """
        with self.lock:
            room = len(messages) if limit is None else max(0, limit - self.admitted)
            self.admitted += len(messages[:room])
            return list(messages[:room])

    def still_ours(self, messages: Sequence[DlqMessage]) -> list[DlqMessage]:
        """Return the messages that SQS hides long enough for a send, and release the others.

        Another consumer may receive the others before the run receives them again.
        """
        with self.lock:
            now = self._clock()
            ours = [
                m
                for m in messages
                if (row := self._find_owned(m)) and now < row.until - self._margin
            ]
            self.release([m for m in messages if m not in ours])
            return ours

    def release(self, messages: Iterable[DlqMessage]) -> list[str]:
        """Forget the given messages that are HELD, and return their receipt handles.

        A message in doubt keeps its row, without a handle.
        """
        handles = []
        with self.lock:
            for message in messages:
                row = self._find_owned(message)
                if row is not None and row.state is RowState.HELD:
                    handles.append(message.handle)
                    self.looked_at -= 1
                    row.handle = None
                    if row.doubted_at is None:
                        del self.rows[message.id]
        return handles

    def _find_owned(self, message: DlqMessage) -> LedgerRow | None:
        row = self.rows.get(message.id)
        return row if row is not None and row.handle == message.handle else None

    # Settling

    def find_doubt(self, message: DlqMessage) -> float | None:
        """Return when the first unanswered send of a message began, in seconds since the epoch.

        Return ``None`` if the message is not in doubt.
        """
        with self.lock:
            row = self.rows.get(message.id)
            return None if row is None else row.doubted_at

    def start_sending(self, messages: Sequence[DlqMessage], at: float) -> list[DlqMessage]:
        """Record in the journal which messages the caller now sends, and return these messages.

        Messages that SQS does not hide long enough for the send are released instead.

        Arguments:
            at: when the send begins, in seconds since the epoch.

        Raises:
            OSError: the journal cannot be written, so no message may be sent.
        """
        with self.lock:
            ours = self.still_ours(messages)
            for message in ours:
                self.rows[message.id].state = RowState.SENDING
        try:
            self._journal.write("sending", [message.id for message in ours], at)
        except BaseException:  # even after a signal, no message stays SENDING without a send
            self._hold(ours)
            raise
        return ours

    def mark_sent(
        self, messages: Sequence[DlqMessage], to: str, *, recognised_since: float | None = None
    ) -> None:
        """Record that SQS has accepted these messages.

        Arguments:
            recognised_since: seconds since the epoch. A FIFO queue discards a duplicate of a
                message that was first sent after this time, so the message is no longer in doubt.
                ``None`` = a standard queue.
        """
        ids = [message.id for message in messages]
        with self.lock:
            for message in messages:
                row = self.rows[message.id]
                row.state, message.handle = RowState.SENT, row.handle or ""
                if recognised_since is not None and (row.doubted_at or 0.0) >= recognised_since:
                    row.doubted_at = None
            self.sent += len(ids)
            twice = [id_ for id_ in ids if self.rows[id_].doubted_at is not None]
            late = self._doubt_late(ids) if recognised_since is None else []
        self._write("sent", ids)
        if late:
            self.emit(events.InDoubt(tuple(late), resend=None))
        if twice and recognised_since is not None:
            self.emit(events.InDoubt(tuple(twice), resend=True))
        self.emit(events.MessagesSent(tuple(ids), to))

    def mark_unsent(self, messages: Sequence[DlqMessage]) -> None:
        """Record that SQS has not accepted these messages.

        A message that is in doubt because of an earlier send stays in doubt.
        """
        self._hold(messages)
        self._write("unsent", [m.id for m in messages if self.rows[m.id].doubted_at is None])

    def mark_in_doubt(
        self, messages: Sequence[DlqMessage], at: float, *, resend: bool | None
    ) -> None:
        """Record that the response to a send was lost.

        Arguments:
            at: when the send began, in seconds since the epoch.
            resend: whether the run sends the messages again. ``None`` = emit no event yet, because
                it will be known later whether the messages were sent. The next response of a FIFO
                queue shows it, or the next look of a restore through the queue.
        """
        self._hold(messages)
        with self.lock:
            new = [m.id for m in messages if self.rows[m.id].doubted_at is None]
            for id_ in new:
                self.rows[id_].doubted_at = at
        if new and resend is not None:
            self.emit(events.InDoubt(tuple(new), resend))

    def _hold(self, messages: Iterable[DlqMessage]) -> None:
        with self.lock:
            for message in messages:
                row = self.rows[message.id]
                row.state, message.handle = RowState.HELD, row.handle or ""

    def settle_doubts(self, found: Collection[str], absent: Collection[str]) -> None:
        """Record as sent the messages in doubt that a restore found on the queue.

        Forget the messages that were absent, so that the restore sends them again.
        """
        with self.lock:
            for id_ in found:
                self.rows[id_].state, self.rows[id_].doubted_at = RowState.SENT, None
            for id_ in absent:
                self.looked_at -= self.rows.pop(id_).handle is not None
            self.sent += len(found)
        self._write("sent", list(found))
        self._write("unsent", sorted(absent))

    def note_present(self, ids: Sequence[str]) -> None:
        """Record in the journal that a restore need not send these messages."""
        self._write("sent", ids)

    def leave(self, messages: Iterable[tuple[DlqMessage, Action, str]]) -> None:
        """Record that messages stay in the source, each with its action and reason."""
        grouped: defaultdict[tuple[Action, str], list[str]] = defaultdict(list)
        with self.lock:
            for message, action, reason in messages:
                if row := self._find_owned(message):
                    row.state, row.left = RowState.LEFT, action
                    self.left[action] += 1
                    self.unknown += reason == UNKNOWN
                    grouped[action, reason].append(message.id)
        for (action, reason), ids in grouped.items():
            if action in _EVENTS:
                self.emit(_EVENTS[action](tuple(ids), reason))

    def mark_deleted(self, ids: Iterable[str], *, name_late: bool) -> None:
        """Record that SQS has deleted these messages.

        Arguments:
            name_late: whether to emit ``InDoubt`` for messages that SQS no longer hid when it
                deleted them. Another run may have sent them, too.
        """
        found: dict[str, LedgerRow] = {}
        ids = list(ids)
        with self.lock:
            late = self._doubt_late(ids) if name_late else []
            for id_ in ids:
                if (row := self.rows.pop(id_, None)) is None:
                    continue  # another thread has deleted the same message
                found[id_] = row
                self.deleted += 1
                self.dropped += row.state is not RowState.SENT
                self._doubted += row.doubted_at is not None
                if row.left is not None:
                    self.left[row.left] -= 1
                self._gone[id_] = None
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        self._write("deleted", list(found))
        if late:
            self.emit(events.InDoubt(tuple(late), resend=None))
        if found:
            self.emit(events.Deleted(tuple(found)))

    def _doubt_late(self, ids: Iterable[str]) -> list[str]:
        """Mark sent messages as in doubt if SQS no longer hides them, and return their IDs.

        Another run may have received and sent them, too.
        """
        now, late = self._clock(), []
        for id_ in ids:
            row = self.rows.get(id_)
            if row and row.state is RowState.SENT and row.doubted_at is None and row.until <= now:
                row.doubted_at = now
                late.append(id_)
        return late

    # Holds

    def due(self, within: float, *, left: bool) -> list[tuple[str, str]]:
        """Return the IDs and receipt handles of messages with a hold that ends soon.

        Arguments:
            within: soon means within this number of seconds. A hold that has ended is left out.
            left: ``True`` = only LEFT messages, ``False`` = only HELD and SENDING messages.
        """
        now = self._clock()
        with self.lock:
            return [
                (id_, row.handle)
                for id_, row in self.rows.items()
                if now < row.until < now + within
                if row.handle is not None and row.state is not RowState.SENT
                if (row.state is RowState.LEFT) is left
            ]

    def renew(self, id_: str, handle: str, until: float) -> bool:
        """Record that SQS hides a message until the time ``until``.

        Return False if the hold had ended before the renewal. SQS can accept the renewal even then,
        but another consumer may have received the message.

        Arguments:
            until: new end of the hold, by the run's clock.
        """
        with self.lock:
            row = self.rows.get(id_)
            if row is None or row.handle != handle:
                return True
            if row.until <= self._clock():
                return False
            row.until = max(row.until, until)
            return True

    def give_all_back(self) -> list[str]:
        """End the holds of all messages that were not sent, and return their receipt handles.

        The caller makes SQS show these messages again.
        """
        with self.lock:
            held = [r for r in self.rows.values() if r.handle and r.state is not RowState.SENT]
            handles = [r.handle for r in held if r.handle and r.until > float("-inf")]
            for row in held:
                row.until = float("-inf")
            return handles

    # The end

    def forget_past(self, before: float) -> None:
        """Forget messages that the journal names and that this run has not received.

        They have probably left the source. But SQS's counts are approximate, and a killed process
        may still hide a message. So the journal keeps a message if it was sent after ``before``
        (seconds since the epoch).
        """
        with self.lock:
            past = {id_: row for id_, row in self.rows.items() if row.handle is None}
            for id_ in past:
                del self.rows[id_]
        last_at = self._journal.last_at
        self._write("gone", [i for i, row in past.items() if (row.doubted_at or last_at) < before])

    def end(self) -> None:
        """Record in the journal that the run has ended, so that the next run does not resume it."""
        self._write("ended", [])

    def name_past(self, *, resend: bool) -> None:
        """Emit ``InDoubt`` for all messages in doubt. ``resend``: as in ``InDoubt``."""
        if ids := tuple(self.doubted):
            self.emit(events.InDoubt(ids, resend))

    def name_doubted(self, messages: Iterable[DlqMessage]) -> None:
        """Emit ``InDoubt`` for the given messages that are in doubt.

        Called for a FIFO queue when the run stops trying to send these messages. For other queues,
        ``mark_in_doubt`` has emitted the event.
        """
        if ids := tuple(m.id for m in messages if self.find_doubt(m) is not None):
            self.emit(events.InDoubt(ids, resend=False))

    def name_unanswered(self) -> None:
        """Mark the messages that are SENDING as in doubt, and emit ``InDoubt`` for them.

        Called if the run is interrupted while SQS has not answered.
        """
        with self.lock:
            rows = {i: row for i, row in self.rows.items() if row.state is RowState.SENDING}
            for row in rows.values():
                row.doubted_at = row.doubted_at or self._clock()
        if rows:
            self.emit(events.InDoubt(tuple(rows), resend=False))

    def name_undeleted(self) -> None:
        if ids := tuple(self.undeleted):
            self.emit(events.NotDeleted(ids, "SQS has not confirmed the delete"))

    # Numbers

    @property
    def places(self) -> int:
        """Number of messages looked at, except messages that this run sent and that came back."""
        return self.looked_at - self.left[Action.CAME_BACK]

    @property
    def share(self) -> float:
        """Share of the received messages that the run sends or deletes. 1 before any receive."""
        return self.admitted / self.places if self.places else 1.0

    @property
    def hidden(self) -> int:
        """Number of messages that SQS hides for this run and that the run has not sent."""
        with self.lock:
            return sum(
                r.handle is not None and r.state is not RowState.SENT for r in self.rows.values()
            )

    @property
    def doubted(self) -> list[str]:
        """IDs of the messages that are in doubt and not deleted."""
        with self.lock:
            return [id_ for id_, row in self.rows.items() if row.doubted_at is not None]

    @property
    def undeleted(self) -> dict[str, str]:
        """Receipt handles, by ID, of messages that were sent but not deleted."""
        with self.lock:
            rows = self.rows.items()
            return {i: r.handle for i, r in rows if r.state is RowState.SENT and r.handle}

    def progress(self, messages: int, limit: int | None) -> events.Progress:
        """Return the progress of the run.

        Arguments:
            messages: number of messages in the source at the start.
            limit: largest number of messages to send or delete; ``None`` = no limit.
        """
        with self.lock:
            numbers, places, done = self.numbers(), self.places, self.sent + self.dropped
            to_send = self.admitted + round(max(0, messages - places) * self.share)
        to_send = max(done, min(to_send, messages if limit is None else limit))
        rate = done / max(0.1, self._clock() - self._began)
        names = ("sent", "failed", "skipped", "poison", "returned", "dropped")
        return events.Progress(
            **{name: numbers[name] for name in names},
            looked_at=places,
            messages=messages,
            to_send=to_send,
            rate=rate,
            eta_seconds=(to_send - done) / rate if rate else None,
        )

    def numbers(self) -> dict[str, Any]:
        """Return the counts of a report."""
        with self.lock:
            left, rows = self.left, self.rows.values()
            returned = left[Action.CAME_BACK]
            return {
                "sent": self.sent,
                "deleted": self.deleted,
                "dropped": self.dropped,
                "failed": left[Action.FAIL],
                "skipped": left[Action.SKIP],
                "poison": left[Action.POISON] + returned,
                "returned": returned,
                "in_doubt": self._doubted + sum(row.doubted_at is not None for row in rows),
                "not_deleted": len(self.undeleted),
                "looked_at": self.looked_at,
                "unknown": self.unknown,
            }

    def _write(self, kind: str, ids: Sequence[str]) -> None:
        """Write a line to the journal, and keep the first error instead of raising it.

        Even if the disk is full, the run must still delete the messages that it has sent.
        """
        try:
            if ids or kind == "ended":
                self._journal.write(kind, ids)
        except OSError as exc:
            self.file_error = self.file_error or exc
