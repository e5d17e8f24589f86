"""Send messages of a dead-letter queue, the *source*, to their queues, and delete sent messages.

A message is *in doubt* if it may have been sent, because SQS's response to the send was lost.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from celery.utils.functional import chunks

from ..sqs.dead_letter import batches
from ..sqs.errors import Failure, Kind
from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_DELAY_SECONDS
from .errors import explain
from .events import Ended
from .halt import TRIES, Halt
from .ledger import Ledger
from .message import DlqMessage
from .options import RedriveOptions
from .queues import Endpoint, Route
from .throttle import Throttle
from .triage import Action

#: A message with its entry for SendMessageBatch.
Outgoing = tuple[DlqMessage, dict[str, Any]]

#: Failures of these kinds do not depend on the message, so a call for any other message on the same
#: queue would fail, too. The failed call had no effect.
CLOSED = {Kind.DENIED, Kind.NO_QUEUE, Kind.LOCAL, Kind.UNSUPPORTED}

#: Seconds after which SQS forgets a FIFO deduplication ID.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html
DEDUPLICATION_SECONDS = 300

#: The run stops if SQS has failed to delete more messages than this.
_MOST_UNDELETED = 100

#: The run stops after this number of sends in a row that SQS did not answer. The messages of these
#: sends stay in doubt.
_MOST_UNANSWERED = 2


class Sender:
    """Sends and deletes the messages of a run. Safe for threads.

    Arguments:
        route: the dead-letter queue and the destinations.

    Attributes:
        run_id: random ID of the run, written into each message's replay mark.
        held_groups: FIFO message groups with a message that stays in the source. To keep the order,
            the run sends no later message of such a group.
    """

    def __init__(
        self,
        route: Route,
        ledger: Ledger,
        halt: Halt,
        throttle: Throttle,
        options: RedriveOptions,
    ) -> None:
        self._source, self._default = route.source, route.default
        self._ledger, self._halt, self._throttle = ledger, halt, throttle
        self._options, self.run_id = options, uuid4().hex[:12]
        self.held_groups: set[str | None] = set()
        # Until SQS has confirmed the first delete of the run, the threads send one batch at a time.
        # If SQS denies this delete, the run ends. So at most one batch is sent but not deleted, and
        # a later run can send only this batch a second time.
        self._first = threading.Lock()
        self._deletes_work = False
        self._undeleted: set[str] = set()
        self._unanswered = 0

    def send_all(self, to: Endpoint, messages: Sequence[DlqMessage]) -> None:
        """Send messages to one queue, at the run's rate. Unsent messages stay in the source."""
        entries = list(self._entries(to, messages))
        for batch in batches(
            entries, size=1 if to.is_fifo else self._throttle.batch_size(self._halt.clock())
        ):
            slot = self._throttle.reserve(len(batch), self._halt.clock())
            while (wait := slot - self._halt.clock()) > 0 and not self._halt.wait(min(wait, 1.0)):
                pass
            if self._halt.is_set:
                return
            group = batch[0][0].group_id
            if to.is_fifo and group in self.held_groups:
                self._fail(to, [batch[0][0]], "an earlier message of its group stays")
            elif not self._send_in_turn(to, batch) and to.is_fifo:
                # SQS no longer hid the message long enough, so the run did not send it, and will
                # receive it again. Release the later messages of its group to send them after it.
                behind = [message for message, _ in entries if message.group_id == group]
                for handles in chunks(iter(self._ledger.release(behind)), MAX_BATCH_ENTRIES):
                    self._source.hide(handles, 0)

    def _entries(self, to: Endpoint, messages: Iterable[DlqMessage]) -> Iterator[Outgoing]:
        for message in messages:
            try:
                entry = self._entry(to, message)
            except Exception:  # noqa: BLE001  # a bad message must not end the run
                self._fail(to, [message], "unreadable: it cannot be sent as it is")
            else:
                yield message, entry

    def _entry(self, to: Endpoint, message: DlqMessage) -> dict[str, Any]:
        """Return the entry for SendMessageBatch, without ``Id``.

        On a FIFO queue, the deduplication ID is made from the message ID in the source. A run that
        continues a killed run uses the same deduplication ID, so SQS accepts each message only
        once. A message that becomes a dead letter again has a new message ID, so it can be replayed
        again. With the original deduplication ID, SQS would discard a replay within five minutes of
        the original send, and report it as sent.
        """
        now, extend = self._halt.now(), self._options.expired == "extend"
        entry = message.entry(run_id=self.run_id, now=now, extend=extend)
        if message.group_id is not None:  # also on a standard queue, for SQS's fair queues
            entry["MessageGroupId"] = message.group_id
        if to.is_fifo:
            entry.setdefault("MessageGroupId", "default")
            entry["MessageDeduplicationId"] = f"redrive-{message.id}"[:128]
            return entry
        delay = message.due_in(now) + random.uniform(0, self._options.spread or 0.0)
        if delay >= 1:
            entry["DelaySeconds"] = min(MAX_DELAY_SECONDS, int(delay))
        return entry

    def _resends(self, to: Endpoint) -> bool | None:
        """Return whether messages in doubt are sent again.

        ``None`` = ``to`` is a FIFO queue. The messages are sent again, but without an ``InDoubt``
        event, because SQS discards duplicates and its next response shows whether they were sent.
        """
        return None if to.is_fifo else self._options.include_unknown

    def _after_sent(self, messages: Sequence[DlqMessage]) -> None:
        self.delete({message.id: message.handle for message in messages})

    def _send_in_turn(self, to: Endpoint, batch: Sequence[Outgoing]) -> bool:
        if self._deletes_work:
            return self._send(to, batch)
        with self._first:
            return self._halt.is_set or self._send(to, batch)

    def _send(self, to: Endpoint, batch: Sequence[Outgoing]) -> bool:
        """Try until each message is sent, failed or in doubt.

        Return False if SQS no longer hid a message of the batch long enough. Such a message is not
        sent, because another run may receive it.
        """
        left, none_lost = list(batch), True
        for attempt in range(1, TRIES + 1):
            began = self._halt.now()
            try:
                ours = self._ledger.start_sending([message for message, _ in left], began)
            except OSError as exc:  # nothing was sent
                self._halt(Ended.FAILED, f"cannot write the journal: {exc.strerror or exc}")
                return none_lost
            none_lost &= len(ours) == len(left)
            if not (left := [entry for entry in left if entry[0] in ours]):
                return none_lost
            results = to.calls.send([entry for _, entry in left])
            answers = list(zip(left, results, strict=True))
            sent = [entry[0] for entry, failure in answers if failure is None]
            failed = [(entry, failure) for entry, failure in answers if failure is not None]
            self._note(to, sent, failed, began)
            closed = [(e, f) for e, f in failed if f.kind in CLOSED and not f.may_have_been_done]
            refused = [x for x in failed if not x[1].is_transient and x not in closed]
            # SQS may refuse the whole batch because of one message, so send each message alone.
            if len(refused) == len(batch) > 1:
                for entry, _ in refused:
                    none_lost &= self._send(to, [entry])
                return none_lost
            for entry, failure in refused:
                self._fail(to, [entry[0]], failure.code)
            if closed:
                self._give_up(to, [entry for entry, _ in closed], closed[0][1])
            left = [e for e, f in failed if f.is_transient and self._may_repeat(to, f)]
            if not left:
                return none_lost
            if attempt < TRIES:
                self._halt.pause(attempt)
        self._give_up(to, left, next(f for e, f in failed if e in left))
        return none_lost

    def _note(
        self,
        to: Endpoint,
        sent: Sequence[DlqMessage],
        failed: Sequence[tuple[Outgoing, Failure]],
        began: float,
    ) -> None:
        ledger = self._ledger
        if sent:
            since = self._halt.now() - DEDUPLICATION_SECONDS if to.is_fifo else None
            ledger.mark_sent(sent, to.name, recognised_since=since)
            self._after_sent(sent)
        doubted = [entry[0] for entry, failure in failed if failure.may_have_been_done]
        ledger.mark_unsent([e[0] for e, f in failed if not f.may_have_been_done])
        if not doubted:
            self._unanswered = 0
            return
        resend = self._resends(to)
        ledger.mark_in_doubt(doubted, began, resend=resend)
        if resend is False:
            ledger.leave([(message, Action.HOLD, "it may have been sent") for message in doubted])
        if not resend and not to.is_fifo:
            self._unanswered = 0 if sent else self._unanswered + 1
            if self._unanswered >= _MOST_UNANSWERED:  # the next messages would end in doubt, too
                self._halt(Ended.UNREACHABLE, f"SendMessageBatch to {to.name}: no answer")

    def _may_repeat(self, to: Endpoint, failure: Failure) -> bool:
        return not failure.may_have_been_done or to.is_fifo or bool(self._resends(to))

    def _fail(self, to: Endpoint, messages: Sequence[DlqMessage], why: str) -> None:
        self._ledger.leave([(message, Action.FAIL, why) for message in messages])
        if to.is_fifo:
            self.held_groups |= {message.group_id for message in messages}

    def _give_up(self, to: Endpoint, left: Sequence[Outgoing], failure: Failure) -> None:
        why = explain(f"SendMessageBatch to {to.name}", failure)
        messages = [message for message, _ in left]
        if to.is_fifo:
            self._ledger.name_doubted(messages)
        self._fail(to, messages, why)
        if failure.kind in CLOSED - {Kind.LOCAL} and to is not self._default:
            return  # messages that came from other queues go elsewhere, so the run continues
        self._halt(Ended.UNREACHABLE, why)

    def drop(self, messages: Sequence[DlqMessage]) -> None:
        """Delete messages without sending them. Mark a message as failed if SQS keeps it."""
        ours = self._ledger.still_ours(messages)
        undeleted = self.delete({message.id: message.handle for message in ours})
        why = "SQS did not delete it"
        self._ledger.leave([(m, Action.FAIL, why) for m in ours if m.id in undeleted])

    def delete(self, handles: Mapping[str, str]) -> set[str]:
        """Delete messages. Return the IDs of the messages that SQS did not delete.

        If the whole call for a batch fails in all tries for a passing reason, such as no answer,
        make no further calls. The messages of the later batches then count as not deleted.

        Arguments:
            handles: their receipt handles, by ID.
        """
        undeleted: dict[str, Failure] = {}
        untried = iter(handles.items())
        for batch in chunks(untried, MAX_BATCH_ENTRIES):
            left = dict(batch)
            for attempt in range(1, TRIES + 1):
                results = zip(left, self._source.calls.delete(list(left.values())), strict=True)
                failed = {id_: failure for id_, failure in results if failure is not None}
                done = [id_ for id_ in left if id_ not in failed]
                self._deletes_work |= bool(done)
                # On a FIFO queue, a second send by another run does no harm: SQS discards it.
                self._ledger.mark_deleted(done, name_late=not self._source.is_fifo)
                left = {id_: left[id_] for id_ in failed}
                if not any(f.is_transient for f in failed.values()) or attempt == TRIES:
                    break
                self._halt.pause(attempt)
            undeleted |= failed
            away = next((f for f in failed.values() if f.is_of_call and f.is_transient), None)
            if away is not None:  # six tries for each further batch could take minutes
                undeleted |= {id_: away for id_, _ in untried}
        with self._ledger.lock:
            self._undeleted.difference_update(handles)
            if undeleted:
                self._stop_if_undeletable(undeleted)
        return set(undeleted)

    def _stop_if_undeletable(self, undeleted: Mapping[str, Failure]) -> None:
        self._undeleted.update(undeleted)
        denied = next((f for f in undeleted.values() if f.kind in CLOSED), None)
        if denied is None and len(self._undeleted) <= _MOST_UNDELETED:
            return
        failure = denied or next(iter(undeleted.values()))
        self._halt(Ended.UNREACHABLE, explain("DeleteMessageBatch", failure))
