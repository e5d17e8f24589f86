"""Sends messages that are held, until the fate of each is known."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence

from ..sqs.errors import Kind
from .deletes import Deletes
from .message import DeadLetter
from .pace import Pace
from .queues import Endpoint
from .report import Ended
from .sender import Packed, Result, entries_for, packed, send
from .settings import Settings
from .sweep import TRIES, Sweep
from .triage import Action, Disposition

__all__ = ["Delivery"]

#: SQS forgets a FIFO deduplication id after so long.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html
_DEDUPLICATION_SECONDS = 300

#: Sends in a row without an answer, whose messages stay in doubt, at which the run stops.
_MOST_UNANSWERED = 2


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
        self._settings, self._pace = settings, pace
        self._run_id, self._default = run_id, default
        self._clock, self._now, self._sleep, self._rng = clock, now, sleep, rng
        #: URLs of queues that are not there or not for us; why.
        self.closed: dict[str, str] = {}
        #: FIFO: groups of which a message is left, so that those after it wait for it.
        self.held_groups: set[str | None] = set()
        self._destinations: dict[str, Endpoint] = {}
        self._unanswered = 0  # sends in a row
        # Until SQS has deleted one batch, only one is sent at a time.
        self._first = threading.Lock()
        self.deletes = Deletes(sweep)

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
            extend=self._settings.expired == "extend",
            now=self._now(),
            spread=self._settings.spread,
            rng=self._rng,
        )
        self._fail(to, unreadable, "unreadable: it cannot be sent as it is")
        lost: set[str | None] = set()  # groups of which a message will be received again
        size = self._pace.batch_size(self._clock())
        for batch in packed(entries, size=size, one_per_group=to.is_fifo):
            if to.is_fifo:
                batch = self._in_order(batch, lost)
            if not batch:
                continue
            slot = self._pace.reserve(len(batch), self._clock())
            while (wait := slot - self._clock()) > 0 and not self._halt.wait(min(wait, 1.0)):
                pass
            if self._halt.is_set:
                return
            ours = self._still_ours(batch)
            lost |= {message.group_id for message, _ in batch if (message, _) not in ours}
            if ours:
                lost |= self._send_first(to, ours)

    def _in_order(self, batch: Sequence[Packed], lost: Collection[str | None]) -> list[Packed]:
        """FIFO: leave what comes after a message that is left; what comes after one that will be
        received again is, too."""
        self._book.fail(
            [message for message, _ in batch if message.group_id in self.held_groups],
            "an earlier message of its group failed",
        )
        batch = [entry for entry in batch if entry[0].group_id not in self.held_groups]
        again = [message for message, _ in batch if message.group_id in lost]
        self._sweep.give_back(self._book.release(again, admitted=True))
        return [entry for entry in batch if entry[0].group_id not in lost]

    def _still_ours(self, batch: Sequence[Packed]) -> list[Packed]:
        """Leave out what may have become visible while it waited: it is received again."""
        ours = self._book.keep_ours([message for message, _ in batch], self._sweep.hold_seconds)
        return _of(batch, ours)

    def _send_first(self, to: Endpoint, batch: Sequence[Packed]) -> set[str | None]:
        """Until a delete has worked, send one batch at a time: if deleting is denied, no more than
        that is delivered and left."""
        if self.deletes.work:
            return self._send(to, batch)
        with self._first:
            if self._halt.is_set:
                return set()
            return self._send(to, batch)

    def _send(self, to: Endpoint, batch: Sequence[Packed]) -> set[str | None]:
        """Send until each message's fate is known; delete what was sent. Returns groups of which
        a message will be received again."""
        lost: set[str | None] = set()
        left, attempt = list(batch), 0
        while left:
            attempt += 1
            result = self._send_once(to, left)
            left = result.again
            lost |= {message.group_id for message in result.lost}
            if result.refused:
                lost |= self._refused(to, result.refused, alone=len(batch) == 1)
            if result.in_doubt:
                left = left + self._in_doubt(to, result.in_doubt)
            if not left:
                break
            if result.closed or attempt == TRIES:
                self._give_up(to, left, result)
                break
            if attempt > 1 or not result.sent:
                self._sweep.pause(attempt)
        return lost

    def _send_once(self, to: Endpoint, batch: Sequence[Packed]) -> Result:
        messages = [message for message, _ in batch]
        try:
            ours = self._book.start_sending(messages, self._now(), self._sweep.hold_seconds)
        except OSError as exc:  # the journal; nothing was sent
            self._halt(Ended.FAILED, f"cannot write the journal: {exc.strerror or exc}")
            return Result()
        result = send(to.calls, _of(batch, ours))
        result.lost = [message for message in messages if message not in ours]
        self._unanswered = 0 if len(result.in_doubt) < len(batch) else self._unanswered + 1
        if result.sent:
            recognised = self._now() - _DEDUPLICATION_SECONDS if to.is_fifo else None
            self._book.has_sent(result.sent, to.name, recognised=recognised)
            self.deletes.sent([(message.id, message.handle) for message in result.sent])
        self._book.was_unsent(result.unsent)
        if result.in_doubt:
            doubted = [message for message, _ in result.in_doubt]
            resend = self._settings.include_unknown
            self._book.is_in_doubt(doubted, resend=resend, is_fifo=to.is_fifo)
        return result

    def _refused(
        self, to: Endpoint, refused: Sequence[tuple[Packed, str]], *, alone: bool
    ) -> set[str | None]:
        """SQS will not have these. As a batch that can be the fault of one of them."""
        lost: set[str | None] = set()
        if not alone and len({code for _, code in refused}) == 1 and len(refused) > 1:
            for item, _ in refused:
                lost |= self._send(to, [item])
            return lost
        for item, code in refused:
            self._fail(to, [item[0]], code)
        return lost

    def _fail(self, to: Endpoint, messages: Sequence[DeadLetter], why: str) -> None:
        self._book.fail(messages, why)
        if to.is_fifo:
            self.held_groups |= {message.group_id for message in messages}

    def _in_doubt(self, to: Endpoint, batch: Sequence[Packed]) -> list[Packed]:
        """The response was lost. Returns what is to be sent again."""
        if to.is_fifo or self._settings.include_unknown:
            return list(batch)  # FIFO: SQS recognises them by the deduplication id
        self._book.leave([(message, Disposition(Action.HOLD)) for message, _ in batch])
        if self._unanswered >= _MOST_UNANSWERED:  # else all the others would end in doubt, too
            self._halt(Ended.UNREACHABLE, f"SendMessageBatch to {to.name}: no answer")
        return []

    def _give_up(self, to: Endpoint, left: Sequence[Packed], result: Result) -> None:
        failure = result.closed or result.failure
        why = f"SendMessageBatch to {to.name}: {failure}"
        if to.is_fifo:
            self._book.name_doubted([message for message, _ in left])
        self._fail(to, [message for message, _ in left], why)
        if result.closed and to is not self._default and result.closed.kind is not Kind.LOCAL:
            self.closed[to.url] = why  # one old message must not end it for all others
        else:
            self._halt(Ended.UNREACHABLE, why)


def _of(batch: Sequence[Packed], messages: Sequence[DeadLetter]) -> list[Packed]:
    return [entry for entry in batch if entry[0] in messages]
