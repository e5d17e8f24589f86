"""Put the messages of an archive back on their dead-letter queue, each once.

A redrive (option ``dump``) or a peek (option ``copy``) has written the archive. A restore does not
change it. The journal records which messages were put back. The restore sends each message with an
attribute, which holds the ID that the message has in the archive. Before the first send, the
restore looks through the queue. It does not send messages that it finds there, because the archive
may be a copy of messages that were never deleted. The look does not see messages that another
consumer hides, or that wait behind a message of their FIFO group. The restore sends these a second
time, and its report warns of such messages.

If SQS's answer to a send is lost, the message is *in doubt*. Then the restore looks for the
message on the queue before it sends the message again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery.utils.functional import chunks

from ..sqs.dead_letter import ATTRIBUTE_NAME, sendable, with_trace
from ..sqs.limits import MAX_BATCH_ENTRIES
from ..threads import steady_seconds
from .errors import RedriveRefused
from .events import RedriveEvent, RedriveReport, Started
from .files import NoJournal, read_archive
from .halt import Halt, carry_out, must_end
from .ledger import Ledger
from .look import look_through
from .message import RESTORED_ATTRIBUTE, DlqMessage, with_mark
from .options import RedriveOptions
from .queues import Endpoint, Route
from .sender import Sender
from .throttle import Throttle
from .triage import Action

#: The restore looks through the queue, and sends absent messages, at most this number of times.
_ROUNDS = 3


class Restore:
    """One restore. Create an object for each restore, and call it once.

    Arguments:
        route: its source is the dead-letter queue.
        options: the restore uses only ``include_unknown``. If it is true, the restore sends a
            message in doubt again even if the message may already be on the queue.
        archive: the file to read.
        messages: number of its messages, from :func:`check_archive`.
        journal: names the messages that earlier restores have put back or left in doubt.
        on_event: is called with one event at a time.
        stop: set it to end the restore early.
        clock, now: as for :class:`.halt.Halt`.
    """

    def __init__(
        self,
        route: Route,
        options: RedriveOptions,
        *,
        archive: Path,
        messages: int,
        journal: NoJournal,
        on_event: Callable[[RedriveEvent], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._queue, self._route, self._options = route.source, route, options
        self._archive, self._messages, self._journal = archive, messages, journal
        self._halt, self._stop = Halt(stop, clock, now), stop
        self._ledger = Ledger(journal, on_event, clock, float("inf"))
        to = Route(self._queue, fixed=self._queue)
        self._sender = _PutBack(to, self._ledger, self._halt, Throttle(None), options)
        #: IDs of the messages that the last look found; ``None`` = the restore has not looked yet.
        self._found: set[str | None] | None = None

    def __call__(self) -> RedriveReport:
        """Put the messages back, and return the report."""
        return carry_out(self._work, self._ledger, self._halt, estimate=lambda: self._ledger.sent)

    def _work(self) -> int:
        ledger, journal = self._ledger, self._journal
        run_id, path = self._sender.run_id, str(journal.path) if journal.path else None
        ledger.emit(Started(run_id, self._queue.name, self._messages, 1, bool(journal.past), path))
        ledger.emit.start()
        for _ in range(_ROUNDS):
            self._look()
            self._send_all()
            if not ledger.doubted or must_end(ledger, self._halt):
                break
        ledger.name_past(resend=False)
        must_end(ledger, self._halt)
        return self._queue.depth_or(ledger.sent)

    def _send_all(self) -> None:
        """Send the messages of the archive that are not on the queue and not in doubt."""
        ledger, at, found = self._ledger, self._halt.clock(), self._found or set()
        for messages in chunks(_read_once(self._archive), MAX_BATCH_ENTRIES):
            if must_end(ledger, self._halt):
                return
            held, _ = ledger.enter(0, messages, float("inf"))
            known = [message for message in held if ledger.find_doubt(message) is None]
            there = [message for message in known if message.id in found]
            ledger.leave([(message, Action.SKIP, "it is on the queue") for message in there])
            ledger.note_present([message.id for message in there])
            absent = [message for message in known if message.id not in found]
            self._sender.send_all(self._queue, ledger.admit(absent, None))
            if self._halt.clock() - at >= 1:
                at = self._halt.clock()
                ledger.emit(ledger.progress(self._messages, None))

    def _look(self) -> None:
        """Look through the queue before the first send, and for messages in doubt.

        A message in doubt that is on the queue counts as sent. Any other message in doubt will be
        sent again if it is surely absent, or with ``include_unknown``. It is surely absent if the
        look has received all messages of the queue, and if the message also has room for its ID as
        an attribute. The look does not recognise a message that was put back without this ID.
        """
        ledger, doubted = self._ledger, set(self._ledger.doubted)
        if must_end(ledger, self._halt) or not (doubted or self._found is None):
            return
        found: set[str | None] = set()
        plan = look_through(
            self._route,
            RedriveOptions(),
            None,
            copy=lambda messages, _: found.update(
                x for m in messages for x in (m.id, m.restored_id)
            ),
            is_open_ended=True,
            stop=self._stop,
            now=self._halt.now,
        )
        unseen = self._queue.depth_or(plan.messages) - plan.looked_at
        if self._found is None and unseen > 0:
            self._halt.detail = (
                f"{unseen} messages of the queue are hidden. If the archive has them, they may be"
                " on the queue twice now"
            )
        self._found = found
        if self._halt.is_set or not doubted:
            return
        absent = doubted - found
        if not self._options.include_unknown:
            entries = ((m.id, _make_entry(m)) for m in _read_once(self._archive))
            marked = {i for i, e in entries if RESTORED_ATTRIBUTE in e.get("MessageAttributes", ())}
            absent &= set() if unseen > 0 else marked
        ledger.settle_doubts(doubted & found, absent)


def check_archive(archive: Path, queue: str) -> int:
    """Return the number of messages in an archive. ``queue``: ARN of the dead-letter queue.

    Raises:
        RedriveRefused: the archive is damaged, or of another queue.
    """
    count = 0
    for message in _read_once(archive):
        if (source := message.message.get("Source")) != queue:
            raise RedriveRefused(
                f"Archive {archive} belongs to {source or 'no queue'}, not to {queue}."
            )
        count += 1
    return count


def _read_once(archive: Path) -> Iterator[DlqMessage]:
    """Yield each message of an archive once, even if the archive has the message twice."""
    seen: set[str] = set()
    for message in read_archive(archive):
        if message.id not in seen:
            seen.add(message.id)
            yield message


class _PutBack(Sender):
    """Sends messages of the archive to their dead-letter queue, with all their attributes.

    It does not send messages in doubt again. ``Restore`` decides when to send them.
    """

    def _entry(self, to: Endpoint, message: DlqMessage) -> dict[str, Any]:
        entry = _make_entry(message)
        if message.group_id is not None:
            entry["MessageGroupId"] = message.group_id
        if to.is_fifo:
            entry["MessageDeduplicationId"] = f"restore-{message.id}"[:128]
        return entry

    def _resends(self, to: Endpoint) -> bool | None:
        return None

    def _after_sent(self, messages: Sequence[DlqMessage]) -> None:
        """Do nothing. A redrive deletes the messages here. A restore leaves them in the archive."""


def _make_entry(message: DlqMessage) -> dict[str, Any]:
    """Return the entry for SendMessageBatch, with the ID in the archive as an attribute.

    The ID is left out if it does not fit into SQS's limits. If SQS itself had moved the message to
    the dead-letter queue, the dead-letter record is left out, because the record is not about this
    move.
    """
    own: Mapping[str, Mapping[str, Any]] = message.message.get("MessageAttributes") or {}
    names = own.keys() - {RESTORED_ATTRIBUTE}
    if message.source_arn is not None:
        names -= {ATTRIBUTE_NAME}
    entry: dict[str, Any] = {"MessageBody": message.body, **with_trace(message.trace)}
    attributes = {name: sendable(own[name]) for name in names}
    return with_mark(entry, attributes, RESTORED_ATTRIBUTE, message.id)
