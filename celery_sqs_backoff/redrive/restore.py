"""Put the messages of an archive back on their dead-letter queue, each once.

A message that an interrupted call may have sent is looked for on the queue before it is sent again.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..sqs.dead_letter import ATTRIBUTE_NAME
from .archive import read_archive
from .delivery import CLOSED, Entry, batches
from .errors import RedriveError, RedriveRefused
from .events import (
    Ended,
    Event,
    Failed,
    Finished,
    InDoubt,
    Progress,
    RedriveReport,
    Sent,
    Started,
    audited,
)
from .halt import TRIES, Halt, pause, steady_seconds
from .journal import NoJournal
from .look import Look
from .message import DeadLetter
from .options import Options
from .queues import Route

#: How often all messages without an answer are looked for and sent again.
_ROUNDS = 3


class Restore:
    """Make one, call it once.

    Arguments:
        route: its source is the dead-letter queue.
        options: which messages, and whether to send those that may be there already.
        journal: knows what earlier processes have put back.
    """

    def __init__(
        self,
        route: Route,
        options: Options,
        *,
        archive: Path,
        journal: NoJournal,
        run_id: str,
        on_event: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._queue, self._route, self._options = route.source, route, options
        self._archive, self._journal, self._run_id = archive, journal, run_id
        self._tell = on_event or (lambda event: None)
        self._halt = Halt(stop)
        self._clock, self._now, self._sleep = clock, now, sleep
        self._doubted = {id_ for id_, at in journal.past.items() if at is not None}
        self._there = set(journal.past) - self._doubted
        self._failed: set[str] = set()
        self._skipped: set[str] = set()
        self._by_task: Counter[str] = Counter()
        self._sent, self._messages, self._told_at = 0, 0, clock()

    def __call__(self) -> RedriveReport:
        """Restore.

        Raises:
            RedriveRefused: the archive is damaged, or of another queue. Nothing was sent.
        """
        self._messages = self._count()
        path = str(self._journal.path) if self._journal.path else None
        resumed = bool(self._there or self._doubted)
        self._tell(Started(self._run_id, self._queue.name, self._messages, 1, resumed, path))
        try:
            for _ in range(_ROUNDS):
                if self._doubted and not self._halt.is_set:
                    self._settle()
                self._send_all()
                if not self._doubted or self._halt.is_set:
                    break
            if self._doubted:
                self._tell(InDoubt(tuple(sorted(self._doubted)), self._options.include_unknown))
            self._write("ended", ())
        except OSError as exc:
            self._halt(Ended.FAILED, f"cannot write the journal: {exc.strerror or exc}")
        except BaseException as exc:
            self._halt(Ended.INTERRUPTED, type(exc).__name__)
            self._finish()
            raise
        return self._finish()

    def _read(self) -> Iterator[DeadLetter]:
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
        size = 1 if self._queue.is_fifo else 10
        limit = self._options.limit
        room = None if limit is None else max(0, limit - self._sent)
        wanted = ((m, self._entry(m)) for m in islice(self._wanted(), room))
        for batch in batches(wanted, size=size):
            if self._halt.is_set:
                return
            self._send(batch)
            if self._clock() - self._told_at >= 1:
                self._told_at = self._clock()
                self._tell(self._progress())

    def _wanted(self) -> Iterator[DeadLetter]:
        now = self._now()
        for message in self._read():
            if message.id in self._there or message.id in self._failed | self._doubted:
                continue
            if not self._options.matches(message, now):
                self._skipped.add(message.id)
            elif message.unreadable == "its attributes":
                self._fail(message, "unreadable: it cannot be sent as it is")
            else:
                yield message

    def _entry(self, message: DeadLetter) -> dict[str, Any]:
        entry: dict[str, Any] = {"MessageBody": message.body}
        if attributes := _attributes(message):
            entry["MessageAttributes"] = attributes
        if message.trace:
            trace = {"DataType": "String", "StringValue": message.trace}
            entry["MessageSystemAttributes"] = {"AWSTraceHeader": trace}
        if message.group_id is not None:
            entry["MessageGroupId"] = message.group_id
        if self._queue.is_fifo:
            entry["MessageDeduplicationId"] = f"restore-{message.id}"[:128]
        return entry

    def _send(self, batch: Sequence[Entry]) -> None:
        left = list(batch)
        for attempt in range(1, TRIES + 1):
            self._write("sending", [m.id for m, _ in left])
            results = self._queue.calls.send([entry for _, entry in left])
            found = [(item, result.failure) for item, result in zip(left, results, strict=True)]
            self._note_sent([item[0] for item, failure in found if failure is None])
            failed = [(item, failure) for item, failure in found if failure is not None]
            lost = [item for item, failure in failed if failure.may_have_been_done]
            rest = [(item, failure) for item, failure in failed if item not in lost]
            self._write("unsent", [item[0].id for item, _ in rest])
            closed = next((failure for _, failure in rest if failure.kind in CLOSED), None)
            if closed is not None:
                self._halt(Ended.UNREACHABLE, f"SendMessageBatch to {self._queue.name}: {closed}")
                return
            refused = [(item, failure) for item, failure in rest if not failure.is_transient]
            if len(refused) == len(batch) > 1:  # it can be the fault of one of them
                for item, _ in refused:
                    self._send([item])
                return
            for item, failure in refused:
                self._fail(item[0], failure.code)
            left = [item for item, failure in rest if failure.is_transient]
            if self._queue.is_fifo and attempt < TRIES:  # SQS knows them by their deduplication id
                left += lost
            else:
                self._doubted.update(item[0].id for item in lost)
            if not left or self._halt.is_set:
                return
            pause(attempt, self._sleep, random.Random())
        self._halt(Ended.UNREACHABLE, f"SendMessageBatch to {self._queue.name}: {failed[0][1]}")

    def _note_sent(self, messages: Sequence[DeadLetter]) -> None:
        if messages:
            ids = [message.id for message in messages]
            self._write("sent", ids)
            self._there.update(ids)
            self._sent += len(ids)
            self._by_task.update(message.task or "(no Celery message)" for message in messages)
            self._tell(Sent(tuple(ids), self._queue.name))

    def _fail(self, message: DeadLetter, why: str) -> None:
        self._failed.add(message.id)
        self._tell(Failed((message.id,), why))

    def _settle(self) -> None:
        """Look for messages in doubt on the queue. Only those that are not there are sent again."""
        doubted = {m.id: _digest(m) for m in self._read() if m.id in self._doubted}
        on_queue = _Found(set(doubted.values()))
        look = Look(self._route, Options(), on_queue, now=self._now)
        plan = look(None, None)
        others = (_digest(m) for m in self._read() if m.id in self._there)
        on_queue.counts.subtract(digest for digest in others if digest in on_queue.counts)
        found = []
        for id_, digest in doubted.items():
            if on_queue.counts[digest] > 0:
                on_queue.counts[digest] -= 1
                found.append(id_)
        self._write("sent", found)
        self._there.update(found)
        self._sent += len(found)
        self._doubted -= set(found)
        if plan.looked_at >= plan.messages or self._options.include_unknown:
            self._write("unsent", sorted(self._doubted))
            self._doubted.clear()

    def _write(self, kind: str, ids: Sequence[str]) -> None:
        self._journal.write(kind, ids, self._now())

    def _progress(self) -> Progress:
        return Progress(
            looked_at=len(self._there) + len(self._failed) + len(self._skipped),
            messages=self._messages,
            sent=self._sent,
            failed=len(self._failed),
            skipped=len(self._skipped),
            poison=0,
            returned=0,
            to_send=self._messages - len(self._skipped),
            rate=0.0,
            eta_seconds=None,
        )

    def _finish(self) -> RedriveReport:
        try:
            remaining = self._queue.depth()
        except RedriveError:  # the report of what was done is worth more than this one number
            remaining = len(self._there)
        ended, detail = self._halt.ended, self._halt.detail
        report = RedriveReport(
            sent=self._sent,
            failed=len(self._failed),
            skipped=len(self._skipped),
            in_doubt=len(self._doubted),
            looked_at=self._messages,
            remaining=remaining,
            ended=ended,
            detail=detail,
        )
        arn = str(self._queue.arn)
        self._tell(
            audited(
                self._options,
                report,
                source=str(self._archive),
                destinations=[arn],
                by_task=self._by_task,
            )
        )
        self._tell(Finished(report, ended.value, detail))
        return report


class _Found:
    """Counts messages of a queue by their content, as an archive would write them."""

    def __init__(self, wanted: set[bytes]) -> None:
        self.counts: Counter[bytes] = Counter(dict.fromkeys(wanted, 0))

    def write(self, messages: Sequence[DeadLetter], destinations: Sequence[str | None]) -> None:
        self.counts.update(d for d in map(_digest, messages) if d in self.counts)


def _attributes(message: DeadLetter) -> dict[str, dict[str, Any]]:
    """Return the attributes of a message as SendMessage takes them.

    Without a record on a message that SQS itself had moved: that is not ours.
    """
    own: Mapping[str, Mapping[str, Any]] = message.message.get("MessageAttributes") or {}
    return {
        name: {
            key: value[key] for key in ("DataType", "StringValue", "BinaryValue") if key in value
        }
        for name, value in own.items()
        if name != ATTRIBUTE_NAME or message.source_arn is None
    }


def _digest(message: DeadLetter) -> bytes:
    content = [message.body, message.group_id, _attributes(message)]
    text = json.dumps(content, sort_keys=True, default=lambda value: value.hex())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
