"""Redrive a dead-letter queue, the *source*. The run receives each message, and sends some of them.

The run deletes a message only if SQS has reported it as sent, or if the operator has asked to
delete it without sending (``delete=True``). Every other message stays in the source. The run looks
at as many messages as were in the source when the run began. If a task fails again, its message can
come back to the source during the run. Such a message does not count towards this number.

A message passes these modules: ``sweep`` receives it, ``ledger`` keeps its state, ``triage``
decides whether to send it, ``sender`` sends and deletes it, ``files`` records the send and the
delete in case the run is killed, and ``events`` reports to the caller.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import ceil, inf

from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from ..threads import steady_seconds
from .events import (
    Ended,
    Progress,
    RedriveEvent,
    RedriveReport,
    RunWaits,
    Started,
)
from .files import Archive, NoJournal
from .halt import Halt, carry_out
from .ledger import Ledger
from .message import DlqMessage
from .options import RedriveOptions, has_selection
from .probe import ProbeGate
from .queues import Endpoint, Route
from .sender import DEDUPLICATION_SECONDS, Sender
from .sweep import MAX_THREADS, Sweep
from .throttle import Throttle
from .triage import EXPIRED, NOT_SELECTED, Action, Disposition, triage

#: Seconds for which a receive hides a message (its *hold*). The second number is for options that
#: select messages. With such options, most messages stay in the source, hidden until the run ends.
#: Long holds need fewer calls to renew them than short holds.
HOLD_SECONDS, FILTER_HOLD_SECONDS = 30, 300

#: With a rate, the run receives a message at most this number of seconds before the send.
_AHEAD_SECONDS = 5.0

#: The run stops when enough messages have come back to the source. Enough means at least this
#: number, and also at least this share of the sent messages.
_RETURNED, _RETURNED_SHARE = 10, 0.1

#: SQS's quota of messages in flight is approximate. So a queue counts as full if this run hides at
#: least this share of the quota.
_QUOTA_SHARE = 0.95

#: A killed run hides its messages for up to 15 minutes more, and SQS's counts are a minute late. So
#: after this number of seconds, SQS shows and counts all messages of a killed run.
_LONGEST_HIDDEN_SECONDS = 960


class RedriveRun:
    """One run of a redrive. Create an object for each run, and call it once.

    Arguments:
        route: the dead-letter queue and the destinations.
        options: the checked options of the redrive.
        journal: the file that records each send.
        archive: the file that gets each message before it is sent or deleted; ``None`` = no file.
        on_event: is called with one event at a time.
        stop: set it to end the run as soon as SQS has answered the calls that are under way.
        clock, now: as for :class:`.halt.Halt`.
        hold_seconds: seconds for which a receive hides a message. ``None`` = 30, or 300 if the
            options select messages.
    """

    def __init__(
        self,
        route: Route,
        options: RedriveOptions,
        *,
        journal: NoJournal,
        archive: Archive | None,
        on_event: Callable[[RedriveEvent], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
        hold_seconds: int | None = None,
    ) -> None:
        self._route, self._options = route, options
        self._source = source = route.source
        self._journal, self._archive = journal, archive
        self._halt = halt = Halt(stop, clock, now)
        self._selects = has_selection(vars(options))
        hold = hold_seconds or (FILTER_HOLD_SECONDS if self._selects else HOLD_SECONDS)
        self.ledger = ledger = Ledger(journal, on_event, clock, hold)
        self._throttle = Throttle(options.rate, ramp=options.ramp or 0.0)
        self._gate = ProbeGate(options.probe, halt)
        self._sender = Sender(route, ledger, halt, self._throttle, options)
        is_after_kill = journal.is_resumed or bool(journal.past)
        patience = journal.last_at + hold + 1 - now() if is_after_kill else 0.0
        self._sweep = Sweep(
            source,
            ledger,
            halt,
            self._handle,
            self._claim,
            hold_seconds=hold,
            patient_until=clock() + max(0.0, min(patience, hold + 1)),
        )
        self._messages = 0  # number of messages in the source at the start
        self._has_reported_wait = False

    def __call__(self) -> RedriveReport:
        """Redrive the messages, and return the report.

        Raises:
            RedriveRefused: the dead-letter queue does not exist any more.
            RedriveUnreachable: SQS did not answer the first call, or denied it.
        """
        self._messages = self._source.depth()
        return carry_out(self._work, self.ledger, self._halt, estimate=self._estimate_remaining)

    def _work(self) -> int:
        if why := self._gate.why_closed():
            self._halt(Ended.GATE, f"not started: {why}")
            return self._messages
        self._look_through()
        self._sender.delete(self.ledger.undeleted)
        self._settle()
        if hidden := self._sweep.give_all_back():
            self._halt.detail = self._halt.detail or (
                f"{hidden} messages that stay in the queue are hidden for up to 15 minutes:"
                " ChangeMessageVisibilityBatch failed"
            )
        self._sweep.must_end()
        if self._halt.ended not in (Ended.UNREACHABLE, Ended.FAILED, Ended.ERROR):
            self.ledger.end()
        remaining = self._source.depth_or(self._estimate_remaining())
        self.ledger.emit(self._progress())
        self._sweep.must_end()
        return remaining

    def _estimate_remaining(self) -> int:
        return max(0, self._messages - self.ledger.deleted)

    def _look_through(self) -> None:
        ledger, journal, threads = self.ledger, self._journal, self._threads()
        ledger.name_past(resend=self._options.include_unknown)
        path = str(journal.path) if journal.path else None
        ledger.emit(
            Started(
                self._sender.run_id,
                self._source.name,
                self._messages,
                threads,
                journal.is_resumed,
                path,
            )
        )
        ledger.emit.start()
        keeper = self._sweep.keep(self._every_second)
        try:
            self._sweep.run(threads)
            self._halt.finish()
            keeper.join()
        finally:
            self._halt.finish()

    def _threads(self) -> int:
        """Return how many threads the messages and the rate need.

        The number is 1 for a FIFO queue, to keep the order of messages.
        """
        default, options = self._route.default, self._options
        if self._source.is_fifo or (default is not None and default.is_fifo):
            return 1
        messages = self._messages
        if options.limit and not self._selects:
            messages = min(messages, options.limit)
        threads = min(MAX_THREADS, ceil(messages / MAX_BATCH_ENTRIES))
        return max(1, threads if options.rate is None else min(threads, ceil(options.rate)))

    def _claim(self) -> int | None:
        """Return how many messages the next receive may return, and reserve places for them.

        ``Ledger.claim`` describes places. If a rate is set and the options do not select messages,
        the number is at most the number of messages that may be sent in 5 s (and at least 1). 0 =
        wait and ask again. ``None`` = stop receiving.
        """
        ledger, limit = self.ledger, self._options.limit
        now, most = self._halt.clock(), MAX_BATCH_ENTRIES
        with ledger.lock:
            if limit is not None:
                if ledger.admitted >= limit:
                    return None
                share = max(ledger.share, 0.1) if self._selects else 1.0
                wanted = ceil((limit - ledger.admitted) / share)
                most = min(most, wanted if self._selects else wanted - ledger.claims)
            rate = self._throttle.rate_at(now)
            if rate is not None:
                next_at = self._throttle.next_at()
                if next_at is not None and next_at - now > _AHEAD_SECONDS:
                    most = 0
                elif not self._selects:
                    most = min(most, max(1, int(_AHEAD_SECONDS * rate)))
            if most < 1:
                return 0 if self._messages > ledger.places + ledger.claims else None
            return ledger.claim(most, self._messages)

    # Received messages

    def _handle(self, messages: list[DlqMessage], sent_before: list[DlqMessage]) -> None:
        ledger, sender = self.ledger, self._sender
        sender.delete({message.id: message.handle for message in sent_before})
        wanted = self._triage(messages)
        admitted = ledger.admit([message for message, _ in wanted], self._options.limit)
        chosen, over = wanted[: len(admitted)], wanted[len(admitted) :]
        if over:
            self._sweep.give_back(ledger.release([message for message, _ in over]))
        if self._archive is not None and chosen:
            arns = [str(d.destination.arn) if d.destination else None for _, d in chosen]
            try:
                self._archive.write([message for message, _ in chosen], arns)
            except OSError as exc:
                self._halt(Ended.FAILED, f"cannot write the archive: {exc.strerror}")
                return
        if dropped := [message for message, d in chosen if d.action is Action.DROP]:
            sender.drop(dropped)
        by_queue: defaultdict[Endpoint, list[DlqMessage]] = defaultdict(list)
        for message, disposition in chosen:
            if disposition.action is Action.SEND and disposition.destination is not None:
                by_queue[disposition.destination].append(message)
        for to, group in by_queue.items():
            sender.send_all(to, group)

    def _triage(self, messages: Sequence[DlqMessage]) -> list[tuple[DlqMessage, Disposition]]:
        """Return the messages to send or delete. Leave all other messages in the source.

        If too many messages have come back, end the run.
        """
        chosen, left, now = [], [], self._halt.now()
        groups = self._sender.held_groups
        for message in messages:
            disposition = triage(
                message,
                self._options,
                self._route.destination,
                now,
                run_id=self._sender.run_id,
                is_in_doubt=self._is_in_doubt(message, now),
            )
            action, reason = disposition.action, disposition.reason
            # On a FIFO queue, no message may overtake an earlier message of its group that stays.
            if self._source.is_fifo and action is Action.SEND and message.group_id in groups:
                action, reason = Action.FAIL, "an earlier message of its group stays"
            if action in (Action.SEND, Action.DROP):
                chosen.append((message, disposition))
                continue
            if self._source.is_fifo and reason not in (NOT_SELECTED, EXPIRED):
                groups.add(message.group_id)
            left.append((message, action, reason))
        if left:
            self.ledger.leave(left)
            self._stop_if_returned()
        return chosen

    def _is_in_doubt(self, message: DlqMessage, now: float) -> bool:
        """Return whether a message may have been sent, so that a second send may be a duplicate.

        Return False for a FIFO queue within five minutes of the first send. The queue then discards
        a second send, because the second send has the same deduplication ID.
        """
        at = self.ledger.find_doubt(message)
        return at is not None and not (self._source.is_fifo and now - at < DEDUPLICATION_SECONDS)

    def _stop_if_returned(self) -> None:
        returned, sent = self.ledger.left[Action.CAME_BACK], self.ledger.sent
        if returned >= max(_RETURNED, _RETURNED_SHARE * sent):
            self._halt(Ended.GATE, f"{returned} of {sent} sent messages came back")

    def _every_second(self) -> None:
        self._gate.watch(self._halt.clock())
        seconds, unseen = self._sweep.seconds_to_wait, self._messages - self.ledger.places
        if seconds and unseen > 0 and not self._has_reported_wait:
            self._has_reported_wait = True
            self.ledger.emit(RunWaits(unseen, seconds))
        self.ledger.emit(self._progress())

    def _progress(self) -> Progress:
        return self.ledger.progress(self._messages, self._options.limit)

    # The end

    def _settle(self) -> None:
        """End the run as INCOMPLETE if SQS counts messages that the run has not received.

        If SQS counts none, and the run has no limit, forget messages of the journal that have left
        the source. Do nothing if the run was ended early.
        """
        ledger, limit = self.ledger, self._options.limit
        if self._halt.ended is not Ended.DONE:
            return
        unseen = max(0, self._messages - ledger.places)
        # New dead letters also count, because a message of the journal may be hidden among them.
        others = self._source.depth_or(ledger.hidden + unseen + 1) - ledger.hidden
        left = min(unseen, others)
        if left > 0 and (limit is None or ledger.admitted < limit):
            why = self._why_hidden()
            self._halt(Ended.INCOMPLETE, f"{left} messages could not be received: {why}")
        elif limit is None:
            before = self._halt.now() - _LONGEST_HIDDEN_SECONDS
            ledger.forget_past(before if others <= 0 else -inf)

    def _why_hidden(self) -> str:
        if self.ledger.hidden >= _QUOTA_SHARE * MAX_IN_FLIGHT_MESSAGES:
            return (
                f"SQS hides at most {MAX_IN_FLIGHT_MESSAGES:,} messages of a queue at a time, and"
                " this run hides about that number. Use a filter that leaves fewer messages"
            )
        if self._source.is_fifo and any(self.ledger.left.values()):
            return (
                "on a FIFO queue they wait behind a message of their group that stays. Send or"
                " delete that message first"
            )
        return (
            "another consumer hides them (a peek, another run or a killed run), or SQS still counts"
            " messages that were deleted. Wait some minutes"
        )
