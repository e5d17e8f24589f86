"""Put the messages of an archive back on their dead-letter queue, each once.

It uses the ledger and the sender of a run. The archive stands for the source and stays complete;
the journal knows which messages were put back. If the answer to a send was lost, the message is
looked for on the queue before it is sent again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery.utils.functional import chunks

from ..sqs.dead_letter import ATTRIBUTE_NAME, sendable
from ..sqs.limits import MAX_BATCH_ENTRIES
from .errors import RedriveError, RedriveRefused
from .events import Ended, Finished, RedriveEvent, RedriveReport, Started
from .files import NoJournal, read_archive
from .halt import Halt, steady_seconds
from .ledger import Ledger, RowState
from .look import look_through
from .message import DlqMessage
from .options import RedriveOptions
from .queues import Endpoint, Route
from .sender import Sender
from .sweep import must_end
from .throttle import Throttle

#: How often all messages without an answer are looked for and sent again.
_ROUNDS = 3


class Restore:
    """Make one, call it once.

    Arguments:
        route: its source is the dead-letter queue.
        options: whether to send messages that may be there already.
        journal: knows what earlier processes have put back.
    """

    def __init__(
        self,
        route: Route,
        options: RedriveOptions,
        *,
        archive: Path,
        journal: NoJournal,
        on_event: Callable[[RedriveEvent], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._queue, self._route, self._options = route.source, route, options
        self._archive, self._journal = archive, journal
        self._halt = Halt(stop, clock, now)
        self._ledger = Ledger(journal, on_event, clock, float("inf"))
        to = Route(self._queue, fixed=self._queue)
        self._sender = _PutBack(to, self._ledger, self._halt, Throttle(None), options)
        self._messages = 0

    def __call__(self) -> RedriveReport:
        """Restore.

        Raises:
            RedriveRefused: the archive is damaged, or of another queue. Nothing was sent.
        """
        self._messages = self._count()
        ledger, path = self._ledger, str(self._journal.path) if self._journal.path else None
        resumed = bool(self._journal.past)
        ledger.emit(
            Started(self._sender.run_id, self._queue.name, self._messages, 1, resumed, path)
        )
        ledger.emit.start()
        try:
            for _ in range(_ROUNDS):
                self._settle_doubts()
                self._send_all()
                if not ledger.doubted or must_end(ledger, self._halt):
                    break
            ledger.name_past(resend=False)
            must_end(ledger, self._halt)
        except BaseException as exc:
            self._halt(Ended.INTERRUPTED, type(exc).__name__)
            self._finish(is_interrupted=True)
            raise
        report = self._finish()
        if (error := self._halt.error or ledger.emit.error) is not None:
            raise error
        return report

    def _read(self) -> Iterator[DlqMessage]:
        seen: set[str] = set()
        for message in read_archive(self._archive):
            if message.id not in seen:
                seen.add(message.id)
                yield message

    def _count(self) -> int:
        count = 0
        for message in self._read():
            if (source := message.message.get("Source")) != str(self._queue.arn):
                raise RedriveRefused(
                    f"Archive {self._archive} is of {source or 'no queue'}, not of"
                    f" {self._queue.arn}."
                )
            count += 1
        return count

    def _send_all(self) -> None:
        """Send the messages that are not there already and not in doubt."""
        ledger, at = self._ledger, self._halt.clock()
        for messages in chunks(self._read(), MAX_BATCH_ENTRIES):
            if must_end(ledger, self._halt):
                return
            held, _ = ledger.enter(0, messages, float("inf"))
            known = [message for message in held if ledger.find_doubt(message) is None]
            self._sender.send_all(self._queue, ledger.admit(known, None))
            if self._halt.clock() - at >= 1:
                at = self._halt.clock()
                ledger.emit(ledger.progress(self._messages, None))

    def _settle_doubts(self) -> None:
        """Look on the queue for messages in doubt. Absent ones are sent again."""
        ledger, ids = self._ledger, set(self._ledger.doubted)
        if not ids or must_end(ledger, self._halt):
            return
        doubted: dict[str, bytes] = {}
        sent: list[bytes] = []  # others with the same content may be there
        for message in self._read():
            row = ledger.rows.get(message.id)
            if message.id in ids:
                doubted[message.id] = _digest(message)
            elif row is not None and row.state is RowState.SENT:
                sent.append(_digest(message))
        on_queue = _Found(set(doubted.values()))
        plan = look_through(
            self._route, RedriveOptions(), None, copy=on_queue.write, now=self._halt.now
        )
        on_queue.counts.subtract(digest for digest in sent if digest in on_queue.counts)
        found = []
        for id_, digest in doubted.items():
            if on_queue.counts[digest] > 0:
                on_queue.counts[digest] -= 1
                found.append(id_)
        is_whole = plan.looked_at >= plan.messages or self._options.include_unknown
        ledger.settle_doubts(found, doubted.keys() - found if is_whole else ())

    def _finish(self, *, is_interrupted: bool = False) -> RedriveReport:
        numbers = self._ledger.numbers()
        try:
            remaining = self._queue.depth()
        except RedriveError:  # the report is worth more than this one number
            remaining = numbers["sent"]
        ended, detail = self._halt.ended, self._halt.detail
        report = RedriveReport(
            **{name: numbers[name] for name in ("sent", "failed", "in_doubt")},
            looked_at=self._messages,
            remaining=remaining,
            ended=ended,
            detail=detail,
        )
        self._ledger.emit(Finished(report, ended.value, detail))
        self._ledger.emit.finish(is_interrupted=is_interrupted)
        return report


class _PutBack(Sender):
    """Sends messages as they are in the archive, and leaves doubts to be settled by a look."""

    def _entry(self, to: Endpoint, message: DlqMessage) -> dict[str, Any]:
        if message.unreadable == "its attributes":
            raise ValueError(message.unreadable)
        entry: dict[str, Any] = {"MessageBody": message.body}
        if attributes := _attributes(message):
            entry["MessageAttributes"] = attributes
        if message.trace:
            trace = {"DataType": "String", "StringValue": message.trace}
            entry["MessageSystemAttributes"] = {"AWSTraceHeader": trace}
        if message.group_id is not None:
            entry["MessageGroupId"] = message.group_id
        if to.is_fifo:
            entry["MessageDeduplicationId"] = f"restore-{message.id}"[:128]
        return entry

    def _resends(self, to: Endpoint) -> bool | None:
        return None

    def _after_sent(self, messages: Sequence[DlqMessage]) -> None:
        """Leave the messages in the archive."""


class _Found:
    """Counts messages of a queue by their content, as an archive would write them."""

    def __init__(self, wanted: set[bytes]) -> None:
        self.counts: Counter[bytes] = Counter(dict.fromkeys(wanted, 0))

    def write(self, messages: Sequence[DlqMessage], destinations: Sequence[str | None]) -> None:
        self.counts.update(d for d in map(_digest, messages) if d in self.counts)


def _attributes(message: DlqMessage) -> dict[str, dict[str, Any]]:
    """Return the attributes of a message as SendMessage takes them.

    Without a record on a message that SQS itself had moved: that is not ours.
    """
    own: Mapping[str, Mapping[str, Any]] = message.message.get("MessageAttributes") or {}
    return {
        name: sendable(value)
        for name, value in own.items()
        if name != ATTRIBUTE_NAME or message.source_arn is None
    }


def _digest(message: DlqMessage) -> bytes:
    content = [message.body, message.group_id, _attributes(message)]
    text = json.dumps(content, sort_keys=True, default=lambda value: value.hex())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
