"""Sends messages that are held, until the fate of each is known, and deletes what was sent."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from ..sqs.errors import Failure, Kind
from .arrivals import Arrivals
from .message import DeadLetter
from .pace import Pace
from .queues import Endpoint
from .report import Ended
from .sender import Packed, Result, entries_for, packed, send
from .settings import Settings
from .source import tens
from .sweep import TRIES, Sweep
from .triage import Action, Disposition

__all__ = ["Delivery"]

#: SQS forgets a FIFO deduplication id after so long.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html
_DEDUPLICATION_SECONDS = 300

#: Sent messages that may be waiting for their delete before the run stops sending.
_MOST_UNDELETED = 100

_NO_DELETE = {Kind.DENIED, Kind.NO_QUEUE, Kind.LOCAL, Kind.UNSUPPORTED}


class Delivery:
    """Safe for threads.

    Arguments:
        sweep: whose source, ledger and end are used.
        default: the destination of messages that do not name one.
        run_id: goes on the messages.
    """

    def __init__(
        self,
        sweep: Sweep,
        settings: Settings,
        pace: Pace,
        arrivals: Arrivals,
        *,
        run_id: str,
        default: Endpoint | None,
        clock: Callable[[], float],
        now: Callable[[], float],
        sleep: Callable[[float], None],
        rng: random.Random,
    ) -> None:
        self.sweep = self._sweep = sweep
        self._book, self._halt = sweep.book, sweep.halt
        self._source = sweep.source
        self._settings, self._pace, self._arrivals = settings, pace, arrivals
        self._run_id, self._default = run_id, default
        self._clock, self._now, self._sleep, self._rng = clock, now, sleep, rng
        self.spread = settings.spread
        #: URLs of queues that are not there or not for us; why.
        self.closed: dict[str, str] = {}
        self._destinations: dict[str, Endpoint] = {}
        # Until SQS has deleted one batch, only one is sent at a time.
        self._first = threading.Lock()
        self._deletes = self._source.is_archive
        self._undeleted: set[str] = set()  # SQS did not delete these when it was asked

    @property
    def destinations(self) -> list[Endpoint]:
        return list(self._destinations.values())

    def held_in_doubt(self, message: DeadLetter, now: float) -> Collection[str]:
        """The message's id, if it may have been sent and cannot be sent again unseen.

        On FIFO, SQS settles it by the deduplication id, for five minutes.
        """
        with self._book.lock:
            at = self._book.ledger.doubted_since(message.id)
        if at is None or (self._source.is_fifo and now - at < _DEDUPLICATION_SECONDS):
            return ()
        return (message.id,)

    def send_all(self, to: Endpoint, messages: Sequence[DeadLetter]) -> None:
        """Send messages to one queue, each in its slot; delete what was sent."""
        self._destinations[to.url] = to
        entries, unreadable = entries_for(
            messages,
            run_id=self._run_id,
            is_fifo=to.is_fifo,
            is_load=self._source.is_archive,
            extend=self._settings.expired == "extend",
            now=self._now(),
            spread=self.spread,
            rng=self._rng,
        )
        self._book.fail(unreadable, "unreadable: it cannot be sent as it is")
        blocked: set[str | None] = set()  # FIFO groups of which a message could not be sent
        size = self._pace.batch_size(self._clock())
        for batch in packed(entries, size=size, one_per_group=to.is_fifo):
            if to.is_fifo and any(message.group_id in blocked for message, _ in batch):
                held = [message for message, _ in batch if message.group_id in blocked]
                self._book.fail(held, "an earlier message of its group failed")
                batch = [entry for entry in batch if entry[0].group_id not in blocked]
            if not batch:
                continue
            slot = self._pace.reserve(len(batch), self._clock())
            while (wait := slot - self._clock()) > 0 and not self._halt.wait(min(wait, 1.0)):
                pass
            if self._halt.is_set:
                return
            ours = self._still_ours(batch)
            blocked |= {message.group_id for message, _ in batch if (message, _) not in ours}
            if ours:
                blocked |= self._send_first(to, ours)

    def drop(self, messages: Sequence[DeadLetter]) -> None:
        """Delete messages unsent; what SQS does not delete has failed."""
        for batch in tens(messages):
            ours = self._book.keep_ours(batch, self._sweep.hold_seconds)
            left = self._delete({m.id: m.handle for m in ours}, dropped=ours)
            self._book.fail([m for m in ours if m.id in left], "SQS did not delete it")

    def delete(self, sent: Sequence[tuple[str, str]]) -> None:
        """Delete messages that were sent: ids and receipt handles."""
        for batch in tens(sent):
            self._delete(dict(batch))

    def delete_what_is_left(self) -> None:
        """At the end: try once more."""
        self.delete(self._book.undeleted())

    def _still_ours(self, batch: Sequence[Packed]) -> list[Packed]:
        """Leave out what may have become visible while it waited: it is received again."""
        ours = self._book.keep_ours([message for message, _ in batch], self._sweep.hold_seconds)
        return _of(batch, ours)

    def _send_first(self, to: Endpoint, batch: Sequence[Packed]) -> set[str | None]:
        """Until a delete has worked, send one batch at a time: if deleting is denied, no more than
        that is delivered and left."""
        if self._deletes:
            return self._send(to, batch)
        with self._first:
            if self._halt.is_set:
                return set()
            return self._send(to, batch)

    def _send(self, to: Endpoint, batch: Sequence[Packed]) -> set[str | None]:
        """Send until each message's fate is known; delete what was sent. Returns failed groups."""
        blocked: set[str | None] = set()
        left, attempt = list(batch), 0
        while left:
            attempt += 1
            result = self._send_once(to, left)
            left = result.again
            blocked |= {message.group_id for message in result.lost}
            if result.refused:
                blocked |= self._refused(to, result.refused, alone=len(batch) == 1)
            if result.in_doubt:
                left = left + self._in_doubt(to, result.in_doubt)
            if not left:
                break
            if result.closed or attempt == TRIES:
                blocked |= {message.group_id for message, _ in left}
                self._give_up(to, left, result)
                break
            if attempt > 1 or not result.sent:
                self._sweep.pause(attempt)
        return blocked

    def _send_once(self, to: Endpoint, batch: Sequence[Packed]) -> Result:
        began, now = self._when_allowed(len(batch)), self._now()
        messages = [message for message, _ in batch]
        try:
            ours = self._book.start_sending(messages, now, self._sweep.hold_seconds)
            result = send(to.calls, _of(batch, ours))
            result.lost = [message for message in messages if message not in ours]
        except OSError as exc:  # the journal; nothing was sent
            self._halt(Ended.FAILED, f"cannot write the journal: {exc.strerror or exc}")
            return Result()
        finally:  # a journal on a full disk must not keep the other threads waiting
            self._arrivals.end(len(batch), began, self._clock())
        if result.sent:
            recognised = self._now() - _DEDUPLICATION_SECONDS if to.is_fifo else None
            self._book.has_sent(result.sent, to.name, recognised=recognised)
            self.delete([(message.id, message.handle) for message in result.sent])
        self._book.was_unsent(result.unsent)
        if result.in_doubt:
            resend = self._settings.in_doubt == "resend"
            doubted = [message for message, _ in result.in_doubt]
            self._book.is_in_doubt(doubted, resend=resend, is_fifo=to.is_fifo)
        return result

    def _when_allowed(self, messages: int) -> float:
        """Wait until so many more may reach SQS; return when that was, by the clock."""
        if self._settings.rate is not None:
            self._arrivals.follow(self._pace.asked)
        while wait := self._arrivals.begin(messages, self._clock()):
            self._sleep(wait)
        return self._clock()

    def _refused(
        self, to: Endpoint, refused: Sequence[tuple[Packed, str]], *, alone: bool
    ) -> set[str | None]:
        """SQS will not have these. As a batch that can be the fault of one of them."""
        blocked: set[str | None] = set()
        if not alone and len({code for _, code in refused}) == 1 and len(refused) > 1:
            for item, _ in refused:
                blocked |= self._send(to, [item])
            return blocked
        for item, code in refused:
            self._book.fail([item[0]], code)
            blocked.add(item[0].group_id)
        return blocked

    def _in_doubt(self, to: Endpoint, batch: Sequence[Packed]) -> list[Packed]:
        """The response was lost. Returns what is to be sent again."""
        if to.is_fifo or self._settings.in_doubt == "resend":
            return list(batch)  # FIFO: SQS recognises them by the deduplication id
        self._book.leave([(message, Disposition(Action.HOLD)) for message, _ in batch])
        return []

    def _give_up(self, to: Endpoint, left: Sequence[Packed], result: Result) -> None:
        failure = result.closed or result.failure
        why = f"SendMessageBatch to {to.name}: {failure}"
        if to.is_fifo:
            self._book.name_doubted([message for message, _ in left])
        self._book.fail([message for message, _ in left], why)
        if result.closed and to is not self._default and result.closed.kind is not Kind.LOCAL:
            self.closed[to.url] = why  # one old message must not end it for all others
        else:
            self._halt(Ended.UNREACHABLE, why)

    # Deleting

    def _delete(
        self, handles: dict[str, str], *, dropped: Sequence[DeadLetter] = ()
    ) -> dict[str, Failure]:
        """Delete; try again what SQS did not delete. Returns what is left."""
        if self._source.is_archive:
            return {}
        left = dict(handles)
        failed: dict[str, Failure] = {}
        for attempt in range(1, TRIES + 1):
            ids = list(left)
            results = self._source.delete(list(left.values()))
            failed = {id_: f for id_, f in zip(ids, results, strict=True) if f is not None}
            done = [id_ for id_ in ids if id_ not in failed]
            if done:
                self._deletes = True
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
            self._undeleted.update(failed)
            undeleted = len(self._undeleted)
        denied = next((f for f in failed.values() if f.kind in _NO_DELETE), None)
        if denied is not None or undeleted > _MOST_UNDELETED:
            code = denied or next(iter(failed.values()), "not deleted")
            self._halt(
                Ended.UNREACHABLE,
                f"DeleteMessageBatch: {code}. {undeleted} messages are sent and still in the queue:"
                " a run without this one's journal sends them again",
            )


def _of(batch: Sequence[Packed], messages: Sequence[DeadLetter]) -> list[Packed]:
    return [entry for entry in batch if entry[0] in messages]
