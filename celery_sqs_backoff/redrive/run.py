"""The engine: several threads that each receive, send what SQS lets them, and delete what was sent.

A message is deleted if, and only if, SQS has reported it as sent. Whatever else happens to it, it
stays in the source. The run looks at as many messages as there were at its start, so what comes
back meanwhile cannot keep it going.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from ..limits import MAX_BATCH_ENTRIES
from ..policies import FullJitter
from ..queues import error_code
from .archive import Archive
from .arrivals import Arrivals
from .broker import Endpoint
from .errors import RedriveError, RedriveRefused
from .events import (
    CanaryPassed,
    CanarySent,
    Deleted,
    Event,
    Failed,
    Finished,
    InDoubt,
    NotDeleted,
    Poison,
    RateChanged,
    Sent,
    Skipped,
    Started,
)
from .gate import Gate
from .journal import NoJournal
from .letter import Letter
from .pace import Pace, seconds_for
from .pack import Packed, packed
from .report import Ended, RedriveReport
from .send import is_denied, is_in_passing, send_batch
from .settings import Settings
from .source import Source
from .tally import Tally
from .units import spell_duration

__all__ = ["Run"]

MAX_THREADS = 16

#: A thread sends about so many messages per second, one at a time; with room to spare.
_PER_THREAD = 12

#: Of a throttled rate, so many seconds' worth is held at a time.
_AHEAD_SECONDS = 5.0

#: Long polls in a row that found nothing, after which the source counts as empty.
_EMPTY_POLLS = 3

_TRIES = 6
_BETWEEN_TRIES = FullJitter(base=0.2, cap=5)

#: SQS forgets a FIFO deduplication id after so long.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html
_DEDUPLICATION_SECONDS = 300

_CANARY_LOST_SHARE = 0.05
_CANARY_POLL_SECONDS = 1.0


class Destinations(Protocol):
    default: Endpoint | None

    #: Why a letter has no destination, and what to do.
    @property
    def unknown(self) -> str: ...

    def destination(self, letter: Letter) -> Endpoint | None: ...


class Run:
    """One run. Make one, call it once.

    Arguments:
        source: where the letters are.
        route: where they go.
        settings: what is asked for.
        journal: written ahead.
        archive: gets each letter before it is sent or dropped; ``None``: none.
        retention_seconds: of the source; ``None``: not known.
        hold_seconds: for how long a run that was killed may still hide messages.
        run_id: goes on the messages.
        on_event: is told of everything.
        stop: set from outside, ends the run as soon as what is in the air has its answer.
        clock: monotonic seconds. ``now``: seconds since the epoch. ``sleep``: between two tries of
            a call. ``rng``: for jitter.
    """

    def __init__(
        self,
        source: Source,
        route: Destinations,
        settings: Settings,
        *,
        journal: NoJournal,
        archive: Archive | None,
        retention_seconds: int | None,
        hold_seconds: int,
        run_id: str,
        on_event: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._source = source
        self._route = route
        self._settings = settings
        self._spread = settings.spread
        self._journal = journal
        self._archive = archive
        self._retention = retention_seconds
        self._hold_seconds = hold_seconds
        self._run_id = run_id
        self._stop = stop or threading.Event()
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._tally = Tally(on_event, clock)
        self._pace = Pace(settings.rate, ramp=settings.ramp)
        self._arrivals = Arrivals(settings.rate)
        self._gate = Gate(
            self._pace,
            probe=settings.probe,
            changed=lambda factor, why: self._tally.tell(RateChanged(factor, why)),
            stop=lambda why: self._halt(Ended.GATE, why),
        )
        self._lock = threading.Lock()
        self._halted = threading.Event()
        self._ended, self._detail = Ended.DONE, ""
        self._error: BaseException | None = None
        self._messages = 0  # in the source at the start
        self._claimed = 0  # of them, looked at or asked for
        self._admitted = 0  # of them, sent or about to be
        self._empty_polls = 0
        self._patient_until = self._lost_until = clock()
        self._to_delete: dict[str, Letter] = {}  # sent, and SQS would not delete them
        self._past = journal.past
        self._destinations: dict[str, Endpoint] = {}
        self._closed: dict[str, str] = {}  # URLs of queues that are not there or not for us; why
        self._usual_depth: dict[str, int] = {}

    def __call__(self) -> RedriveReport:
        """Run.

        Raises:
            RedriveRefused: it must not begin. Nothing was sent.
            RedriveUnreachable: SQS did not answer at the very start.
        """
        if why := self._gate.why_closed():
            return self._told(self._source.count(), Ended.GATE, f"not started: {why}")
        self._messages = self._source.count()
        resumed = not self._past.is_settled
        if resumed:
            self._patient_until = self._clock() + self._hold_seconds + 1
            self._name_those_in_doubt()
        threads = self._threads()
        self._tally.tell(Started(self._run_id, self._source.name, self._messages, threads, resumed))
        keeper = threading.Thread(target=self._keep, name="redrive-keeper", daemon=True)
        keeper.start()
        try:
            if self._settings.canary and self._messages:
                if (main := self._route.default) is not None:
                    self._usual_depth[main.url] = main.depth().total
                canary = self._settings.canary
                self._spread = 0.0  # the canary is waited for
                self._phase(1, limit=min(canary, self._settings.limit or canary))
                self._watch_canary()
                self._spread = self._settings.spread
            self._phase(threads, limit=self._settings.limit)
        finally:
            # Threads look at this between any two steps; what is in the air gets its answer.
            self._halted.set()
            keeper.join()
            self._settle()
        if self._error is not None:
            raise self._error
        return self._finish()

    # The threads

    def _threads(self) -> int:
        """FIFO: one, or the order would be lost. Throttled: as many as hold the rate, and one."""
        default, rate = self._route.default, self._settings.rate
        if self._source.url.endswith(".fifo") or (default and default.is_fifo):
            return 1
        wanted = self._settings.threads or MAX_THREADS
        if rate is not None and self._settings.threads is None:
            wanted = min(wanted, int(rate / _PER_THREAD) + 2)
        messages = min(self._messages, self._settings.limit or self._messages)
        return max(1, min(wanted, -(-messages // MAX_BATCH_ENTRIES)))

    def _phase(self, threads: int, *, limit: int | None) -> None:
        """Let threads work until the source is looked through, or ``limit`` letters are sent."""
        workers = [
            threading.Thread(target=self._work, args=(limit,), name=f"redrive-{i}", daemon=True)
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():  # with a timeout, so that signals get through
                    worker.join(0.05)
                    self._interrupted()
        except BaseException:  # KeyboardInterrupt: what is in the air gets its answer
            self._halted.set()
            for worker in workers:
                worker.join()
            raise

    def _work(self, limit: int | None) -> None:
        try:
            while not self._halted.is_set():
                claim = self._claim(limit)
                if not claim:
                    return
                letters = self._receive(claim)
                if not letters:
                    self._refund(claim)
                    if self._is_dry():
                        return
                    continue
                self._refund(claim - len(letters))
                self._handle(letters, limit)
        except BaseException as exc:  # noqa: BLE001
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        """End the run; ``__call__`` raises the exception, in the caller's thread."""
        with self._lock:
            self._error = self._error or exc
        self._halted.set()

    def _claim(self, limit: int | None) -> int:
        """How many messages to ask for now; 0: the run has asked for all it may."""
        now = self._clock()
        most = MAX_BATCH_ENTRIES
        if (rate := self._pace.rate_at(now)) is not None:
            most = max(1, min(most, int(rate * _AHEAD_SECONDS)))
        with self._lock:
            left = self._messages - self._claimed
            if limit is not None:
                left = min(left, limit - self._admitted)
            claim = max(0, min(most, left))
            self._claimed += claim
            return claim

    def _refund(self, messages: int) -> None:
        with self._lock:
            self._claimed -= messages

    def _receive(self, messages: int) -> list[Letter]:
        for attempt in range(1, _TRIES + 1):
            try:
                letters = self._source.receive(messages)
            except (ClientError, BotoCoreError) as exc:
                if not isinstance(exc, ClientError):  # SQS may have hidden some for us all the same
                    self._lost_until = self._clock() + self._hold_seconds + 1
                if attempt == _TRIES or not is_in_passing(exc):
                    self._halt(Ended.UNREACHABLE, f"ReceiveMessage: {error_code(exc)}")
                    return []
                self._pause(attempt)
                if self._halted.is_set():
                    return []
            else:
                with self._lock:
                    self._empty_polls = 0 if letters else self._empty_polls + 1
                return letters
        return []

    def _is_dry(self) -> bool:
        """Whether to believe that nothing is left. The messages of a killed run are hidden for a
        while (its journal knows that they are there), as are those of an answer that was lost."""
        now = self._clock()
        return (
            self._empty_polls >= _EMPTY_POLLS
            and now >= self._lost_until
            and (self._past.is_settled or now >= self._patient_until)
        )

    # One receive

    def _handle(self, letters: Sequence[Letter], limit: int | None) -> None:
        self._refuse_if_too_late(letters)
        chosen = self._sort(letters)
        with self._lock:
            room = len(chosen) if limit is None else max(0, limit - self._admitted)
            self._admitted += min(room, len(chosen))
        chosen, over = chosen[:room], chosen[room:]
        if over:
            self._source.give_back([letter for letter, _ in over])
            self._refund(len(over))
        if self._archive is not None and chosen:
            self._archive.write(
                [letter for letter, _ in chosen],
                [to.url if to else None for _, to in chosen],
            )
        if self._settings.delete:
            self._delete([letter for letter, _ in chosen], count="dropped")
            return
        by_url: dict[str, list[Letter]] = defaultdict(list)
        for letter, to in chosen:
            assert to is not None
            self._destinations[to.url] = to
            by_url[to.url].append(letter)
        for url, group in by_url.items():
            self._send_all(self._destinations[url], group)

    def _sort(self, letters: Sequence[Letter]) -> list[tuple[Letter, Endpoint | None]]:
        """Leave the letters that are to be sent, each with its destination; see to the others."""
        now, settings = self._now(), self._settings
        chosen: list[tuple[Letter, Endpoint | None]] = []
        aside: dict[tuple[type[Any], str], list[Letter]] = defaultdict(list)
        sent_before: list[Letter] = []
        drop: list[Letter] = []
        for letter in letters:
            replayed = letter.replayed
            if letter.id in self._past.sent and self._source.is_archive:
                aside[Skipped, "sent by an earlier run"].append(letter)
            elif letter.id in self._to_delete:
                self._refund(1)  # it was looked at before
                sent_before.append(letter)
            elif letter.id in self._past.sent:
                sent_before.append(letter)
            elif self._source.is_aside(letter):
                self._refund(1)
            elif replayed.run_id == self._run_id:
                aside[Poison, "came back in this run"].append(letter)
            elif not settings.selection.matches(letter, now):
                aside[Skipped, "not selected"].append(letter)
            elif replayed.replays >= settings.max_replays:
                aside[Poison, f"replayed {replayed.replays} times"].append(letter)
            elif self._is_held_in_doubt(letter, now):
                aside[InDoubt, ""].append(letter)
            elif settings.delete:
                chosen.append((letter, self._route.destination(letter)))
            elif letter.is_expired(now) and settings.expired == "leave":
                aside[Skipped, "expired"].append(letter)
            elif letter.is_expired(now) and settings.expired == "drop":
                drop.append(letter)
            elif (to := self._route.destination(letter)) is None:
                aside[Failed, self._route.unknown].append(letter)
            elif why := self._closed.get(to.url):
                aside[Failed, why].append(letter)
            else:
                chosen.append((letter, to))
        for (kind, reason), found in aside.items():
            self._put_aside(kind, reason, found)
        if sent_before:
            self._delete(sent_before, count=None)
        if drop:
            if self._archive is not None:
                self._archive.write(drop, [None] * len(drop))
            self._delete(drop, count="dropped")
        return chosen

    def _put_aside(self, kind: type[Any], reason: str, letters: Sequence[Letter]) -> None:
        self._source.put_aside(letters)
        ids = tuple(letter.id for letter in letters)
        if kind is InDoubt:  # named at the start
            for id_ in ids:
                self._past.in_doubt.pop(id_, None)
            return
        name = {Poison: "poison", Skipped: "skipped", Failed: "failed"}[kind]
        self._tally.tell(kind(ids, reason), **{name: len(ids)})
        if kind is Poison and reason == "came back in this run":
            self._tally.add("returned", len(ids))
            self._gate.returned(
                len(ids),
                sent=self._tally["sent"],
                now=self._clock(),
                sent_per_second=self._tally.per_second,
            )

    def _refuse_if_too_late(self, letters: Iterable[Letter]) -> None:
        """SQS deletes by the clock of the first send: a run too slow for that loses the tail."""
        rate, sent_at = self._settings.rate, [x.sent_at for x in letters if x.sent_at is not None]
        if self._settings.force or rate is None or self._retention is None or not sent_at:
            return
        messages = min(self._messages, self._settings.limit or self._messages)
        left = min(sent_at) + self._retention - self._now()
        needed = seconds_for(messages, rate, self._settings.ramp) - self._tally["sent"] / rate
        if needed > left and not self._tally["sent"]:
            raise RedriveRefused(
                f"At this rate the redrive takes {spell_duration(needed)}, but SQS deletes the"
                f" oldest message in {spell_duration(left)}. Raise the rate, raise the queue's"
                " retention period, or force it.",
                overridable=True,
            )

    # Sending

    def _send_all(self, to: Endpoint, letters: Sequence[Letter]) -> None:
        now = self._now()
        extend = self._settings.expired == "extend"
        entries = [
            (letter, letter.entry(run_id=self._run_id, now=now, extend=extend))
            for letter in letters
        ]
        blocked: set[str | None] = set()  # FIFO groups of which a message could not be sent
        size = self._pace.batch_size(self._clock())
        for batch in packed(entries, size=size, one_per_group=to.is_fifo):
            if to.is_fifo and any(letter.group_id in blocked for letter, _ in batch):
                held = [letter for letter, _ in batch if letter.group_id in blocked]
                self._put_aside(Failed, "an earlier message of its group failed", held)
                batch = [entry for entry in batch if entry[0].group_id not in blocked]
            if not batch:
                continue
            slot = self._pace.reserve(len(batch), self._clock())
            while (wait := slot - self._clock()) > 0 and not self._halted.wait(wait):
                pass
            if self._halted.is_set():
                return
            batch = self._still_ours(batch)
            if batch:
                blocked |= self._send(to, batch)

    def _still_ours(self, batch: Sequence[Packed]) -> list[Packed]:
        """Leave out what may have become visible while it waited: it is received again."""
        ours = [packed for packed in batch if self._source.is_ours(packed[0])]
        if lost := [letter for letter, _ in batch if not self._source.is_ours(letter)]:
            self._source.forget(lost)
            with self._lock:
                self._claimed -= len(lost)
                self._admitted -= len(lost)
        return ours

    def _send(self, to: Endpoint, batch: Sequence[Packed]) -> set[str | None]:
        """Send until each message's fate is known; delete what was sent. Returns failed groups."""
        blocked: set[str | None] = set()
        # Once in doubt, always in doubt: that a second try failed says nothing of the first.
        doubtful = {letter.id for letter, _ in batch if letter.id in self._past.in_doubt}
        left, attempt = list(batch), 0
        while left:
            attempt += 1
            began, now = self._when_allowed(len(left)), self._now()
            try:
                self._journal.sending([letter.id for letter, _ in left], now)
                answer = send_batch(to, left, now=now, spread=self._spread, rng=self._rng)
            finally:  # a journal on a full disk must not keep the other threads waiting
                self._arrivals.end(len(left), began, self._clock())
            if answer.sent:
                self._sent(to, answer.sent)
            doubtful |= {letter.id for letter, _ in answer.in_doubt}
            unsent = [x.id for x, _ in answer.again] + [entry[0].id for entry, _ in answer.refused]
            self._journal.unsent([id_ for id_ in unsent if id_ not in doubtful])
            left = answer.again
            if answer.refused:
                blocked |= self._refused(to, answer.refused, alone=len(batch) == 1)
            if answer.in_doubt:
                left = left + self._in_doubt(to, answer.in_doubt)
            if not left:
                break
            if answer.denied or attempt == _TRIES:
                blocked |= {letter.group_id for letter, _ in left}
                why = f"SendMessageBatch to {to.name}: {answer.error}"
                self._put_aside(Failed, why, [letter for letter, _ in left])
                if answer.denied and to is not self._route.default:
                    self._closed[to.url] = why  # one old letter must not end it for all others
                elif answer.denied or answer.whole_call:
                    self._halt(Ended.UNREACHABLE, why)
                break
            if attempt > 1 or not answer.sent:
                self._pause(attempt)
            left = self._still_ours(left)
        return blocked

    def _when_allowed(self, messages: int) -> float:
        """Wait until so many more may reach SQS; return when that was, by the clock."""
        while wait := self._arrivals.begin(messages, self._clock()):
            self._sleep(wait)
        return self._clock()

    def _sent(self, to: Endpoint, letters: Sequence[Letter]) -> None:
        ids = tuple(letter.id for letter in letters)
        self._journal.sent(ids)
        try:
            self._tally.tell(Sent(ids, to.name), sent=len(ids))
        finally:  # whatever a user's on_event may raise
            self._delete(letters, count=None)

    def _refused(
        self, to: Endpoint, refused: Sequence[tuple[Packed, str]], *, alone: bool
    ) -> set[str | None]:
        """SQS will not have these. As a batch that can be the fault of one of them."""
        blocked: set[str | None] = set()
        if not alone and len({code for _, code in refused}) == 1 and len(refused) > 1:
            for packed_, _ in refused:
                blocked |= self._send(to, [packed_])
            return blocked
        for packed_, code in refused:
            self._put_aside(Failed, code, [packed_[0]])
            blocked.add(packed_[0].group_id)
        return blocked

    def _in_doubt(self, to: Endpoint, batch: Sequence[Packed]) -> list[Packed]:
        """The answer was lost. Returns what is to be sent again."""
        if to.is_fifo:
            return list(batch)  # SQS recognises them by the deduplication id
        ids = tuple(letter.id for letter, _ in batch)
        resend = self._settings.in_doubt == "resend"
        self._tally.tell(InDoubt(ids, resend), in_doubt=len(ids))
        if resend:
            return list(batch)
        self._source.put_aside([letter for letter, _ in batch])
        return []

    def _delete(self, letters: Sequence[Letter], *, count: str | None) -> None:
        """Delete; try again what SQS did not delete. What is left is tried at the end once more."""
        if self._source.is_archive:
            return
        left = list(letters)
        for attempt in range(1, _TRIES + 1):
            failed = self._source.delete(left)
            done = tuple(letter.id for letter in left if letter.id not in failed)
            if done:
                self._journal.deleted(done)
                with self._lock:
                    for id_ in done:
                        self._to_delete.pop(id_, None)
                        self._past.sent.discard(id_)
                        self._past.in_doubt.pop(id_, None)
                counts = {"deleted": len(done)} | ({count: len(done)} if count else {})
                self._tally.tell(Deleted(done), **counts)
            left = [letter for letter in left if letter.id in failed]
            if not left or not self._is_worth_another(failed.values()) or attempt == _TRIES:
                break
            self._pause(attempt)
        if left and count is not None:
            self._put_aside(Failed, "SQS did not delete it", left)
        elif left:
            with self._lock:
                self._to_delete.update((letter.id, letter) for letter in left)

    @staticmethod
    def _is_worth_another(codes: Iterable[str]) -> bool:
        """A receipt handle that has expired is not; nor is a call that is not allowed."""
        return not all(
            is_denied(code.rpartition(".")[2])
            or code.rpartition(".")[2] in {"ReceiptHandleIsInvalid", "InvalidParameterValue"}
            for code in codes
        )

    # What an earlier run has left

    def _name_those_in_doubt(self) -> None:
        if not self._past.in_doubt:
            return
        ids = tuple(self._past.in_doubt)
        resend = self._settings.in_doubt == "resend"
        self._tally.tell(InDoubt(ids, resend), in_doubt=len(ids))

    def _is_held_in_doubt(self, letter: Letter, now: float) -> bool:
        """On FIFO, SQS settles it by the deduplication id, for five minutes."""
        at = self._past.in_doubt.get(letter.id)
        if at is None or self._settings.in_doubt == "resend":
            return False
        return not (self._source.url.endswith(".fifo") and now - at < _DEDUPLICATION_SECONDS)

    # The canary

    def _watch_canary(self) -> None:
        """Wait until the canary has left the main queue, or is back."""
        sent = self._tally["sent"]
        if self._halted.is_set() or not sent:
            return
        self._tally.tell(CanarySent(sent))
        deadline = self._clock() + self._settings.canary_timeout
        quiet = 0
        while quiet < 2:  # twice: SQS's counts are approximate
            if self._halted.wait(_CANARY_POLL_SECONDS) or self._interrupted():
                return
            back = self._source.count() - (self._messages - self._tally["deleted"])
            if back > _CANARY_LOST_SHARE * sent:
                self._tally.add("returned", back)
                self._halt(Ended.GATE, f"{back} of the {sent} canary messages came back")
                return
            gone = all(
                to.depth().total <= self._usual_depth.get(to.url, 0)
                for to in self._destinations.values()
            )
            quiet = quiet + 1 if gone else 0
            if not quiet and self._clock() >= deadline:
                waited = spell_duration(self._settings.canary_timeout)
                self._halt(Ended.GATE, f"the canary has not left the main queue within {waited}")
                return
        self._tally.tell(CanaryPassed(sent))
        self._pace.restart(self._clock())

    # Beginning, keeping, ending

    def _keep(self) -> None:
        """Once a second: renew what is held, ask the provider, tell of progress."""
        try:
            while not self._halted.wait(1.0):
                self._source.renew()
                self._gate.watch(self._clock(), self._tally.per_second)
                self._tell_progress()
        except BaseException as exc:  # noqa: BLE001
            self._fail(exc)

    def _tell_progress(self) -> None:
        messages = min(self._messages, self._settings.limit or self._messages)
        self._tally.progress(looked_at=min(self._claimed, messages), messages=messages)

    def _halt(self, ended: Ended, detail: str) -> None:
        """End the run; the first reason counts."""
        with self._lock:
            if not self._halted.is_set():
                self._ended, self._detail = ended, detail
                self._halted.set()

    def _interrupted(self) -> bool:
        if self._stop.is_set():
            self._halt(Ended.INTERRUPTED, "stopped from outside")
        return self._halted.is_set()

    def _pause(self, attempt: int) -> None:
        """Between two tries. Not cut short by a halt: it is short, and tries are few."""
        self._sleep(_BETWEEN_TRIES.delay(attempt, self._rng))

    def _settle(self) -> None:
        """Delete what is sent, give back all else."""
        if left := list(self._to_delete.values()):
            for start in range(0, len(left), MAX_BATCH_ENTRIES):
                self._delete(left[start : start + MAX_BATCH_ENTRIES], count=None)
        self._source.give_all_back()

    def _finish(self) -> RedriveReport:
        if ids := tuple(self._to_delete):
            self._tally.tell(NotDeleted(ids, "SQS refused"), not_deleted=len(ids))
        try:
            remaining = self._source.count()
        except RedriveError:  # the report of what was done is worth more than this one number
            remaining = max(0, self._messages - self._tally["deleted"])
        if self._ended is not Ended.UNREACHABLE:
            self._journal.ended()
        self._tell_progress()
        return self._told(remaining, self._ended, self._detail)

    def _told(self, remaining: int, ended: Ended, detail: str) -> RedriveReport:
        report = self._tally.report(remaining=remaining, ended=ended, detail=detail)
        self._tally.tell(Finished(report))
        return report
