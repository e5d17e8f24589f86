"""Hands events to ``on_event`` in a thread of its own.

A callback may block: a terminal is stopped by Ctrl-S, a pipe is full. Then messages must still be
deleted, and their holds renewed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from .events import Audit, Event, Finished

#: How long the last events wait for a callback that blocks, if a signal has interrupted the run.
_LAST_WORDS_SECONDS = 2.0


class Listener:
    """Calls ``on_event`` with one event at a time, in their order. Safe for threads.

    Attributes:
        error: what ``on_event`` raised. It is not called again but for the end.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __call__(self, event: Event) -> None:
        """Hand out an event. Never raises. Until the thread is started, wait for the callback."""
        if self._thread is None:
            self._deliver(event)
        else:
            self._queue.put(event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="redrive-events", daemon=True)
        self._thread.start()

    def finish(self, *, is_interrupted: bool = False) -> None:
        """Wait until all events are delivered.

        Arguments:
            is_interrupted: a callback that blocks is not waited for any longer than two seconds.
        """
        if (thread := self._thread) is not None:
            self._queue.put(None)
            thread.join(_LAST_WORDS_SECONDS if is_interrupted else None)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        if self._on_event is None or (self.error and not isinstance(event, Audit | Finished)):
            return
        try:
            self._on_event(event)
        except BaseException as exc:  # noqa: BLE001  # a user's: raised when the run has ended
            self.error = self.error or exc
