"""The stream of a worker's events, to which all observers listen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..text import error_site
from .events import WorkerEvent

logger = logging.getLogger(__name__)

Listener = Callable[[WorkerEvent], object]


class Events:
    """Hands each event to every listener, in the thread that emits it.

    A listener must return quickly. If it raises, that is logged once per listener, and the
    other listeners are still called.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._broken: set[int] = set()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event. Return a function that removes it."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unsubscribe

    def emit(self, event: WorkerEvent) -> None:
        """Hand an event to all listeners. Never raises."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001
                # A broken observer must not hold up the message that it observes.
                if id(listener) not in self._broken:
                    self._broken.add(id(listener))
                    logger.error("sqs_backoff.listener_failed: %s: %s", event.name, error_site(exc))
