"""A pool of threads with one leader: it waits for the next job, the others run jobs.

Before the thread that waits begins with a job, another takes its place: a spare one, or a new one.
So there are as many threads as jobs under way and one more, and a job that hangs holds up nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from celery.utils.log import get_logger

from ..text import BUG_CALLS, error_site

logger = get_logger(__name__)

#: A thread that has nothing to do beside the one that waits ends after this long.
_SPARE_SECONDS = 10.0

#: The leader checks for jobs at least this often, whatever the clock says.
_LONGEST_WAIT_SECONDS = 5.0

#: No job takes longer: the clients' timeouts end a call; credentials may be fetched first.
_LONGEST_JOB_SECONDS = 90.0

#: What is left of a job when its call has returned waits for nobody.
_LONGEST_REST_SECONDS = 20.0

#: Pause after an unexpected error.
_AFTER_BUG_SECONDS = 1.0


class _Phase(Enum):
    """What a job does; the value says so of one that takes too long."""

    CALL = "a call to SQS has not returned"
    REST = "a thread of the keeper has not turned"

    def limit_seconds(self) -> float:
        return _LONGEST_JOB_SECONDS if self is _Phase.CALL else _LONGEST_REST_SECONDS


class Relay:
    """The threads.

    Arguments:
        lock: an ``RLock`` around what the jobs come from; held while ``due_at`` is called.
        next_job: returns a job that is due, if any. It must not raise.
        perform: carries it out. It must not raise.
        due_at: when a job may be due; ``None``: there will be none, the threads end.
        clock: for that time, in seconds.
    """

    def __init__(
        self,
        lock: Any,
        *,
        next_job: Callable[[], Callable[[], None] | None],
        perform: Callable[[Callable[[], None]], None],
        due_at: Callable[[], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._next_job = next_job
        self._perform = perform
        self._due_at = due_at
        self._clock = clock
        self._lead = threading.Condition(lock)
        self._spares = threading.Condition(lock)
        self._has_lead = False
        self._looks_at: float | None = None
        self._threads: set[threading.Thread] = set()
        self._spare_count = 0
        #: Threads with a job; since when, and what for.
        self._busy: dict[threading.Thread, tuple[float, _Phase]] = {}

    def start(self) -> None:
        """Start the first thread, if none runs."""
        with self._lock:
            if not self._threads:
                self._add_thread()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the threads to end, for a while."""
        deadline = time.monotonic() + timeout_seconds
        while (threads := self._alive()) and time.monotonic() < deadline:
            threads[0].join(max(0.0, deadline - time.monotonic()))

    def fault(self) -> str | None:
        """Say what is wrong with the threads; ``None``: they wait, and carry jobs out.

        Besides no thread at all: one that died with its job under way, whose end nobody will
        enter, and a job that takes longer than any call may.
        """
        if not self._alive():
            return "the keeper has died"
        now = time.monotonic()
        for thread, (since, phase) in list(self._busy.items()):
            if not thread.is_alive():
                return "a thread of the keeper has died in a call to SQS"
            if now - since > phase.limit_seconds():
                return f"{phase.value} for {now - since:.0f} s"
        return None

    def call_returned(self) -> None:
        """Note, in the thread of a job, that its call to SQS has ended: the rest must be quick."""
        thread = threading.current_thread()
        if thread in self._busy:
            self._busy[thread] = time.monotonic(), _Phase.REST

    # With the lock held

    def look_at(self, at: float) -> None:
        """A job is due then: wake the thread that waits, if it would look later."""
        if self._looks_at is not None and at < self._looks_at:
            self._looks_at = at
            self._lead.notify()

    def wake(self) -> None:
        """Wake all threads, so that those no longer needed can end."""
        self._lead.notify_all()
        self._spares.notify_all()

    # The threads

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="sqs-keeper", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _alive(self) -> list[threading.Thread]:
        # Without the lock, which a thread that hangs may hold.
        return [thread for thread in tuple(self._threads) if thread.is_alive()]

    def _run(self) -> None:
        try:
            while self._take_the_lead():
                job = self._wait_for_job()
                self._pass_the_lead(is_needed=job is not None)
                if job is None:
                    return
                self._busy[threading.current_thread()] = time.monotonic(), _Phase.CALL
                self._perform(job)
                del self._busy[threading.current_thread()]  # not if it dies: that is a fault
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _take_the_lead(self) -> bool:
        """Become the thread that waits for the next job; ``False``: not needed any more."""
        with self._lock:
            while self._has_lead:
                self._spare_count += 1
                is_called = self._spares.wait(_SPARE_SECONDS)
                self._spare_count -= 1
                if self._has_lead and (not is_called or self._due_at() is None):
                    return False
            self._has_lead = True
            return True

    def _pass_the_lead(self, *, is_needed: bool) -> None:
        with self._lock:
            self._has_lead = False
            if not is_needed:
                self._spares.notify_all()
            elif self._spare_count:
                self._spares.notify()
            else:
                try:
                    self._add_thread()
                except (RuntimeError, MemoryError):
                    # The machine has no thread left: this one waits again after its job.
                    logger.warning("sqs_backoff.no_thread_left: calls to SQS wait for each other")

    def _wait_for_job(self) -> Callable[[], None] | None:
        while True:
            try:
                if (job := self._next_job()) is not None:
                    return job
            except Exception as exc:  # noqa: BLE001
                # A bug. Without a thread in the lead nothing would be renewed or settled any more.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
                with self._lock:
                    self._lead.wait(_AFTER_BUG_SECONDS)
            with self._lock:
                at, now = self._due_at(), self._clock()
                if at is None:
                    return None
                if at > now:
                    self._looks_at = at
                    self._lead.wait(min(_LONGEST_WAIT_SECONDS, at - now))
                    self._looks_at = None
