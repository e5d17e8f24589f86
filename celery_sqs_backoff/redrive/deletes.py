"""Deletes what was sent, and what is to be dropped; stops the run if SQS does not delete."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..sqs.errors import Failure, Kind
from .book import name_late
from .message import DeadLetter
from .report import Ended
from .source import tens
from .sweep import TRIES, Sweep

__all__ = ["Deletes"]

#: Messages that SQS has not deleted when it was asked, beyond which the run stops.
_MOST_UNDELETED = 100

_NO_DELETE = {Kind.DENIED, Kind.NO_QUEUE, Kind.LOCAL, Kind.UNSUPPORTED}


class Deletes:
    """Safe for threads.

    Arguments:
        sweep: whose source, ledger and end are used.

    Attributes:
        work: SQS has deleted something.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._source = sweep, sweep.source
        self._book, self._halt = sweep.book, sweep.halt
        self.work = False
        self._undeleted: set[str] = set()  # SQS did not delete these when it was asked

    def drop(self, messages: Sequence[DeadLetter]) -> None:
        """Delete messages unsent; what SQS does not delete has failed."""
        for batch in tens(messages):
            ours = self._book.keep_ours(batch, self._sweep.hold_seconds)
            left = self._delete({m.id: m.handle for m in ours}, dropped=ours)
            self._book.fail([m for m in ours if m.id in left], "SQS did not delete it")

    def sent(self, sent: Sequence[tuple[str, str]]) -> None:
        """Delete messages that were sent: ids and receipt handles."""
        for batch in tens(sent):
            self._delete(dict(batch))

    def try_once_more(self) -> None:
        """At the end: what was sent and is not deleted yet."""
        self.sent(self._book.undeleted())

    def _delete(
        self, handles: dict[str, str], *, dropped: Sequence[DeadLetter] = ()
    ) -> dict[str, Failure]:
        """Delete; try again what SQS did not delete. Returns what is left."""
        left = dict(handles)
        failed: dict[str, Failure] = {}
        for attempt in range(1, TRIES + 1):
            ids = list(left)
            results = self._source.delete(list(left.values()))
            failed = {id_: f for id_, f in zip(ids, results, strict=True) if f is not None}
            done = [id_ for id_ in ids if id_ not in failed]
            if done:
                self.work = True
            if not self._source.is_fifo:  # there SQS recognises what another run sends
                name_late(self._book, done)
            self._book.has_deleted(done, [m for m in dropped if m.id in done])
            left = {id_: left[id_] for id_ in failed}
            if not any(f.is_transient for f in failed.values()) or attempt == TRIES:
                break
            self._sweep.pause(attempt)
        self._stop_if_undeletable(handles, failed)
        return failed

    def _stop_if_undeletable(self, tried: Collection[str], failed: Mapping[str, Failure]) -> None:
        with self._book.lock:
            self._undeleted.difference_update(tried)
            if not failed:
                return
            self._undeleted.update(failed)
            undeleted = len(self._undeleted)
            sent = len([id_ for id_, _ in self._book.undeleted() if id_ in self._undeleted])
        denied = next((f for f in failed.values() if f.kind in _NO_DELETE), None)
        if denied is not None or undeleted > _MOST_UNDELETED:
            why = f"DeleteMessageBatch: {denied or next(iter(failed.values()), 'not deleted')}"
            if sent:
                why += (
                    f". {sent} messages are sent, and SQS has not deleted them: a run without this"
                    " one's journal sends them again"
                )
            self._halt(Ended.UNREACHABLE, why)
