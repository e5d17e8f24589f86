"""Receive each message of a queue once, in several threads, and keep it hidden until the run ends.

This is a *sweep*. A redrive and a peek each give the sweep a function that handles the messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TypeVar

from celery.utils.functional import chunks

from ..sqs.errors import Failure, Kind
from ..sqs.limits import MAX_BATCH_ENTRIES
from .errors import explain
from .events import GRACE_SECONDS, Ended
from .halt import TRIES, Halt, must_end
from .ledger import Ledger
from .message import DlqMessage
from .queues import Endpoint

MAX_THREADS = 16

#: The queue counts as empty after this many empty long polls in a row.
_EMPTY_POLLS = 3

#: A receive that returns only messages of an earlier receive counts as this share of an empty poll.
_KNOWN_SHARE = 1 / 50

#: Seconds for which one renewal hides a message that stays in the source.
_LEFT_SECONDS = 900

#: A *hold* is the time for which a message is hidden. The run renews a hold when less than this
#: number of seconds is left, or less than half of the hold if that is shorter (15 s of 30 s).
_RENEW_SECONDS = 60.0

T = TypeVar("T")
R = TypeVar("R")


class Sweep:
    """The threads that receive messages, and the thread that renews holds.

    A receive hides a message from other consumers for some seconds. These seconds are the message's
    *hold*.

    Arguments:
        handle: is called in any of the threads, with the messages of a receive that were not sent
            yet, and the messages that were sent before and only have to be deleted.
        most: returns how many messages the next receive may return; 0 = wait; ``None`` = the sweep
            is over.
        hold_seconds: seconds that a hold lasts.
        patient_until: until this time of the run's clock, empty polls do not end the sweep. The
            queue may still have messages, hidden by a killed run or by a receive with a lost
            response.
    """

    def __init__(
        self,
        source: Endpoint,
        ledger: Ledger,
        halt: Halt,
        handle: Callable[[list[DlqMessage], list[DlqMessage]], None],
        most: Callable[[], int | None],
        *,
        hold_seconds: int,
        patient_until: float,
    ) -> None:
        self.source, self.ledger, self.halt = source, ledger, halt
        self._handle, self._most = handle, most
        self._hold_seconds, self.patient_until = hold_seconds, patient_until
        self._empty_polls = 0.0

    def run(self, threads: int) -> None:
        """Receive and handle messages in ``threads`` threads until the sweep is over."""
        workers = [
            threading.Thread(target=self.work, name=f"redrive-{i}", daemon=True)
            for i in range(threads)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException:
            # The user has sent a second signal, or a thread could not start. Wait for SQS's answers
            # for two seconds at most.
            self.halt.finish()
            until = monotonic() + GRACE_SECONDS
            for worker in workers:
                if worker.is_alive():  # a thread that was never started cannot be joined
                    worker.join(max(0.0, until - monotonic()))
            raise

    def keep(self, every_second: Callable[[], None]) -> threading.Thread:
        """Start the thread that renews the holds and calls ``every_second`` until the run ends."""

        def keep() -> None:
            try:
                while not self.halt.wait(1.0):
                    self.renew()
                    every_second()
                    self.must_end()
            except BaseException as exc:  # noqa: BLE001  # the run raises it at its end
                self.halt.fail(exc)

        thread = threading.Thread(target=keep, name="redrive-keeper", daemon=True)
        thread.start()
        return thread

    def renew(self) -> None:
        """Renew the holds that end soon.

        Several threads renew them, because one thread could be too slow to renew all in time. After
        the end of a hold, another consumer may receive the message.
        """
        within = min(_RENEW_SECONDS, self._hold_seconds / 2)
        for left, seconds in ((False, self._hold_seconds), (True, _LEFT_SECONDS)):
            _call_in_parallel(partial(self._renew, seconds), self.ledger.due(within, left=left))

    def _renew(self, seconds: int, batch: Sequence[tuple[str, str]]) -> None:
        until = self.halt.clock() + seconds
        results = self.source.hide([handle for _, handle in batch], seconds)
        for (id_, handle), failure in zip(batch, results, strict=True):
            if failure is None and not self.ledger.renew(id_, handle, until):
                # The hold had ended, so another consumer may have received the message. If not, the
                # renewal hides the message, and the sweep must not end before SQS shows it again.
                self.patient_until = max(self.patient_until, until + 1)

    def give_back(self, handles: Iterable[str]) -> int:
        """Make SQS show messages to all consumers. Return for how many the call failed.

        A stale receipt handle is no failure, because the run no longer hides its message.
        """
        results = _call_in_parallel(lambda batch: self.source.hide(batch, 0), list(handles))
        failures = [failure for batch in results for failure in batch if failure is not None]
        return sum(failure.kind is not Kind.STALE_HANDLE for failure in failures)

    def give_all_back(self) -> int:
        return self.give_back(self.ledger.give_all_back())

    def work(self) -> None:
        try:
            while not self.must_end() and (wanted := self._most()) is not None:
                if wanted < 1:
                    self.halt.wait(0.02)
                    continue
                asked_at = self.halt.clock()
                found = self._receive(wanted)
                ours, sent = self.ledger.enter(wanted, found, asked_at + self._hold_seconds)
                if found:
                    self._handle(ours, sent)
                if ours or sent:
                    self._empty_polls = 0.0
                else:
                    # If all messages are known from an earlier receive, the queue may still have
                    # new messages. So such a receive counts much less than an empty poll.
                    self._empty_polls += _KNOWN_SHARE if found else 1
                is_dry = (
                    self._empty_polls >= _EMPTY_POLLS and self.halt.clock() >= self.patient_until
                )
                if is_dry and not ours:
                    break
            self.must_end()
        except BaseException as exc:  # noqa: BLE001  # the run raises it at its end
            self.halt.fail(exc)

    @property
    def seconds_to_wait(self) -> float:
        """Seconds that the sweep waits for hidden messages, because the queue seems to be empty.

        0 if it still receives messages, or waits no longer.
        """
        if self._empty_polls < _EMPTY_POLLS:
            return 0.0
        return max(0.0, self.patient_until - self.halt.clock())

    def must_end(self) -> bool:
        return must_end(self.ledger, self.halt)

    def _receive(self, messages: int) -> list[DlqMessage]:
        for attempt in range(1, TRIES + 1):
            found = self.source.receive(messages, self._hold_seconds)
            if not isinstance(found, Failure):
                return found
            if found.may_have_been_done:  # SQS may have hidden messages for this receive
                until = self.halt.clock() + self._hold_seconds + 1
                self.patient_until = max(self.patient_until, until)
            if attempt == TRIES or not found.is_transient:
                self.halt(Ended.UNREACHABLE, explain("ReceiveMessage", found))
                break
            self.halt.pause(attempt)
            if self.halt.is_set:
                break
        return []


def _call_in_parallel(call: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """Make a call for each batch of ten items, in several threads. Return the results in order."""
    batches = list(chunks(iter(items), MAX_BATCH_ENTRIES))
    if len(batches) < 2:
        return [call(batch) for batch in batches]
    pool = ThreadPoolExecutor(min(MAX_THREADS, len(batches)), "redrive-hold")
    try:
        return list(pool.map(call, batches))
    finally:  # if a second signal ended the wait, do not make the remaining calls
        pool.shutdown(wait=False, cancel_futures=True)
