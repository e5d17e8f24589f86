"""One thread that waits for the next call to SQS; idle threads of the process make the calls.

A call that hangs holds up nobody: its thread is taken out of the others' until it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..text import BUG_CALLS, error_site
from ..threads import call_in_time

logger = get_logger(__name__)

#: The thread looks for jobs at least this often, whatever the clock says.
_LONGEST_WAIT_SECONDS = 5.0

#: Pause after an unexpected error.
_AFTER_BUG_SECONDS = 1.0


class Relay:
    """The thread that waits.

    Arguments:
        lock: an ``RLock`` around what the jobs come from; held while ``due_at`` is called.
        next_job: returns a job that is due, if any.
        perform: carries it out. It must not raise.
        due_at: when a job may be due; ``None``: there will be none, and the thread ends.
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
        self._changed = threading.Condition(lock)
        self._next_job = next_job
        self._perform = perform
        self._due_at = due_at
        self._clock = clock
        self._looks_at: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="sqs-keeper", daemon=True)
            thread.start()  # without it nothing is renewed: let it raise
            self._thread = thread

    def join(self, timeout_seconds: float) -> None:
        """Wait for the thread to end, for a while."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def fault(self) -> str | None:
        """Say that the thread has died; ``None``: it waits, and hands jobs out."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return None if is_alive else "the keeper has died"

    # With the lock held

    def look_at(self, at: float) -> None:
        """Wake the thread if it would look for a job that is due then too late."""
        if self._looks_at is not None and at < self._looks_at:
            self._looks_at = at
            self._changed.notify()

    def wake(self) -> None:
        """Wake the thread, so that it can end."""
        self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        while True:
            try:
                if (job := self._next_job()) is not None:
                    self._hand_out(job)
                    continue
            except Exception as exc:  # noqa: BLE001
                # A bug. Without this thread nothing would be renewed or settled any more.
                logger.error("sqs_backoff.keeper_failed: %s", error_site(exc, calls=BUG_CALLS))
                time.sleep(_AFTER_BUG_SECONDS)
            with self._lock:
                at, now = self._due_at(), self._clock()
                if at is None:
                    return
                if at > now:
                    self._looks_at = at
                    self._changed.wait(min(_LONGEST_WAIT_SECONDS, at - now))
                    self._looks_at = None

    def _hand_out(self, job: Callable[[], None]) -> None:
        if call_in_time(partial(self._perform, job), seconds=0) is None:
            logger.warning("sqs_backoff.no_thread_left: calls to SQS wait for each other")
            self._perform(job)
