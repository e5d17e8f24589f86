"""Look at each message of a source once, with several threads, and keep what was looked at hidden.

A run and a peek are both a sweep; they differ in what they do with a message.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..retry.policies import FullJitter
from ..sqs.errors import Failure, Kind
from .book import Book
from .halt import Halt
from .ledger import Receipt, Row, State
from .message import DeadLetter
from .report import Ended
from .source import QueueSource, tens

__all__ = ["MAX_THREADS", "Holding", "Sweep"]

MAX_THREADS = 16

TRIES = 6
BETWEEN_TRIES = FullJitter(base=0.2, cap=5)

#: Long polls in a row that found nothing, after which the source counts as empty.
_EMPTY_POLLS = 3

#: Receives of messages that were looked at before, which weigh as much as one that found nothing.
_KNOWN_POLLS = 50

#: A message that is put aside is hidden for so long at a time. Seconds.
_ASIDE_SECONDS = 900

#: How long before its end a hold is renewed, at most. Seconds.
_RENEW_SECONDS = 60.0


@dataclass(frozen=True)
class Holding:
    """For how many seconds ReceiveMessage hides a message.

    Attributes:
        seconds: of a run that sends what it receives.
        sweep_seconds: of one that leaves most of it. They stay hidden until the end without
            another call, unless it takes longer.
    """

    seconds: int = 30
    sweep_seconds: int = 300


class Sweep:
    """The threads of a run.

    Arguments:
        source: where the messages are.
        book: the ledger.
        halt: ends it.
        places: look at so many messages, at most.
        hold_seconds: for how long a receive hides a message.
        patient_until: by the clock; before, an empty source is not believed to be empty.
        clock: seconds; goes on while the machine sleeps.
        sleep, rng: between two tries of a call.
    """

    def __init__(
        self,
        source: QueueSource,
        book: Book,
        halt: Halt,
        *,
        places: int,
        hold_seconds: int,
        patient_until: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        rng: random.Random,
    ) -> None:
        self.source, self.book, self.halt = source, book, halt
        self.places = places
        self.hold_seconds = hold_seconds
        self._patient_until = patient_until
        self._clock, self._sleep, self._rng = clock, sleep, rng
        self._empty_polls = 0.0
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="redrive-hold")

    def run(
        self,
        threads: int,
        handle: Callable[[dict[Receipt, list[DeadLetter]]], None],
        *,
        most: Callable[[], int] = lambda: 10,
        limit: int | None = None,
    ) -> None:
        """Let threads work until the source is looked through, or ``limit`` messages are admitted.

        Arguments:
            handle: is called with what was received, from any thread.
            most: how many messages to ask for now; 0: none, ask again soon.
        """
        workers = [
            threading.Thread(
                target=self._work, args=(handle, most, limit), name=f"redrive-{i}", daemon=True
            )
            for i in range(threads)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                while worker.is_alive():  # with a timeout, so that signals get through
                    worker.join(0.05)
        except BaseException:  # KeyboardInterrupt: what is under way gets its answer
            self.halt.finish()
            for worker in workers:
                if worker.is_alive():  # one that has not begun yet sees the halt first
                    worker.join()
            raise

    def keep(self, every_second: Callable[[], None]) -> threading.Thread:
        """Start the thread that renews holds until the end."""

        def keep() -> None:
            try:
                while not self.halt.wait(1.0):
                    self.renew()
                    every_second()
                    self._look_for_errors()
            except BaseException as exc:  # noqa: BLE001  # it is raised where the run was called
                self.halt.fail(exc)

        thread = threading.Thread(target=keep, name="redrive-keeper", daemon=True)
        thread.start()
        return thread

    def renew(self) -> None:
        """Renew what is soon over, in batches side by side: a late one is a lost one."""
        now = self._clock()
        with self.book.lock:
            due = list(self.book.ledger.due(now, min(_RENEW_SECONDS, self.hold_seconds / 2)))
        batches: list[tuple[int, list[tuple[str, Row]]]] = []
        for aside, seconds in ((False, self.hold_seconds), (True, _ASIDE_SECONDS)):
            rows = [x for x in due if (x[1].state in (State.ASIDE, State.CAME_BACK)) is aside]
            batches += [(seconds, batch) for batch in tens(rows)]
        list(self._pool.map(lambda batch: self._renew(*batch), batches))

    def _renew(self, seconds: int, rows: Sequence[tuple[str, Row]]) -> None:
        handles = [row.handle for _, row in rows]
        now = self._clock()
        results = self.source.hide(handles, seconds)
        with self.book.lock:
            answered_at = self._clock()
            for (id_, row), handle, failure in zip(rows, handles, results, strict=True):
                is_late = row.until <= answered_at
                if is_late and failure is None:
                    # SQS takes an old handle, too: somebody else may have the message by now. If
                    # nobody has, it is hidden, and comes again.
                    self._patient_until = max(self._patient_until, answered_at + seconds + 1)
                until = None if failure or is_late else now + seconds
                self.book.ledger.renewed(id_, handle, until)

    def give_back(self, handles: Sequence[str]) -> int:
        """Show messages to everybody at once. Returns how many stay hidden, and come back by
        themselves."""
        results = self._pool.map(lambda batch: self.source.hide(batch, 0), tens(handles))
        failures = [failure for batch in results for failure in batch if failure is not None]
        return sum(failure.kind is not Kind.STALE_HANDLE for failure in failures)

    def give_all_back(self) -> int:
        with self.book.lock:
            handles = self.book.ledger.give_all_back()
        refused = self.give_back(handles)
        self._pool.shutdown()
        return refused

    def close(self) -> None:
        """Let the threads for holds end, whatever has ended the run.

        A signal that interrupts the start of such a thread keeps its pool from ever knowing it;
        the process would wait for it at its end, for ever.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def pause(self, attempt: int) -> None:
        """Between two tries. Not cut short by a halt: it is short, and tries are few."""
        self._sleep(BETWEEN_TRIES.delay(attempt, self._rng))

    def _work(self, handle: Callable[[Any], None], most: Any, limit: int | None) -> None:
        try:
            self._look_for_errors()
            while not self.halt.is_set and self.book.room(places=self.places, limit=limit):
                if (wanted := most()) < 1:
                    self.halt.wait(0.02)
                    continue
                claim = self.book.claim(wanted, places=self.places, limit=limit)
                if not claim:  # another thread was faster
                    return
                requested_at = self._clock()
                messages = self._receive(claim)
                found = self.book.received(claim, messages, requested_at + self.hold_seconds)
                if messages:
                    handle(found)
                self._note(found)
                if not found.get(Receipt.NEW) and self._is_dry():
                    return
                self._look_for_errors()
        except BaseException as exc:  # noqa: BLE001  # it is raised where the run was called
            self.halt.fail(exc)

    def _look_for_errors(self) -> None:
        if self.book.error is not None:
            self.halt.fail(self.book.error)
        if (exc := self.book.file_error) is not None:
            self.halt(Ended.FAILED, f"cannot write the journal: {exc.strerror or exc}")

    def _receive(self, messages: int) -> list[DeadLetter]:
        for attempt in range(1, TRIES + 1):
            found = self.source.receive(messages, self.hold_seconds)
            if not isinstance(found, Failure):
                return found
            if found.may_have_been_done:  # SQS may have hidden some for us all the same
                self._patient_until = max(
                    self._patient_until, self._clock() + self.hold_seconds + 1
                )
            if attempt == TRIES or not found.is_transient:
                self.halt(Ended.UNREACHABLE, f"ReceiveMessage: {found.code}")
                break
            self.pause(attempt)
            if self.halt.is_set:
                break
        return []

    def _note(self, found: Mapping[Receipt, Sequence[DeadLetter]]) -> None:
        """Count receives in a row that brought nothing new."""
        if found.get(Receipt.NEW) or found.get(Receipt.SENT_BEFORE):
            self._empty_polls = 0.0
        else:  # what was put aside and could not be kept hidden says little of what is left
            self._empty_polls += 1 if not found else 1 / _KNOWN_POLLS

    def _is_dry(self) -> bool:
        """Whether to believe that nothing is left. The messages of a killed run are hidden for a
        while (its journal knows that they are there), as are those of a response that was lost."""
        return self._empty_polls >= _EMPTY_POLLS and self._clock() >= self._patient_until
