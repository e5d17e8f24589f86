"""Hands received messages to Celery's consumer, in the thread of its loop, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from .lease import Lease, State
from .window import Window

logger = get_logger(__name__)

#: Without an event loop, Celery looks at signals between two waits of this length.
_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received message on its way to Celery.

    ``again`` is what to call for a message that Celery has had already, and that may start now.
    """

    queue: str
    payload: dict[str, Any]
    tag: str
    lease: Lease
    again: Callable[[], object] | None = None


class Inbox:
    """Messages that wait for Celery's loop, under their leases.

    Arguments:
        deliver: gives a message to Celery; called in its loop.
        window: updated with the fate of each message.
        is_stopping: whether no further task may start.
        soon: schedules a callable in the event loop, from any thread. ``None``: Celery has no
            event loop and calls :meth:`drain_events` instead.
        one_at_a_time: delivering a task may block the loop until it ends (solo, gevent).
        on_error: what to do with a message that Celery fails to take.
        on_turn: called each time Celery, where it has no event loop, looks for messages.
    """

    def __init__(
        self,
        *,
        deliver: Callable[[Arrival], object],
        window: Window,
        is_stopping: Callable[[], bool],
        soon: Callable[[Callable[[], object]], object] | None,
        one_at_a_time: bool,
        on_error: Callable[[Arrival, BaseException], object],
        on_turn: Callable[[], object] = lambda: None,
    ) -> None:
        self._deliver = deliver
        self._window = window
        self._is_stopping = is_stopping
        self._soon = soon
        self._one_at_a_time = one_at_a_time
        self._on_error = on_error
        self._on_turn = on_turn
        self._cond = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._will_drain = False
        window.on_freed = self.wake

    def put(self, arrival: Arrival) -> None:
        """Add a message; from any thread."""
        with self._cond:
            self._arrivals.append(arrival)
            self._cond.notify()
        self.wake()

    def wake(self) -> None:
        """Deliver soon what can be delivered; from any thread."""
        if self._soon is None:
            with self._cond:
                self._cond.notify()
            return
        with self._cond:
            if self._will_drain or not self._arrivals:
                return
            self._will_drain = True
        self._soon(self._drain)

    def clear(self) -> None:
        """Drop all waiting messages. The caller gives their leases back."""
        with self._cond:
            left, self._arrivals = list(self._arrivals), deque()
            self._will_drain = False
        for arrival in left:
            self._window.freed(arrival.tag)

    def drain_events(self) -> None:
        """Wait briefly for a message, then deliver everything that can be delivered.

        Raises:
            TimeoutError: no message arrived.
        """
        self._on_turn()
        with self._cond:
            if not self._can_deliver():
                self._cond.wait(_WAIT_SECONDS)
            if not self._can_deliver():
                raise TimeoutError
        while self._can_deliver():
            self._deliver_one()

    def _drain(self) -> None:
        try:
            while self._can_deliver():
                self._deliver_one()
                if self._one_at_a_time:
                    break
        finally:
            with self._cond:
                self._will_drain = False
            if self._can_deliver():
                self.wake()

    def _can_deliver(self) -> bool:
        if not self._arrivals or self._is_stopping():
            return False
        return not self._one_at_a_time or self._window.has_free_process

    def _deliver_one(self) -> None:
        try:
            arrival = self._arrivals.popleft()
        except IndexError:
            return
        lease = arrival.lease
        if lease.state is not State.HELD:
            self._window.freed(arrival.tag)  # given back, or lost, while it waited
            return
        try:
            self._deliver(arrival)
        except Exception as exc:  # noqa: BLE001  # whatever is wrong with it, others are waiting
            self._on_error(arrival, exc)
        if lease.state is State.HELD and not lease.keeps_place:
            self._window.blocked(arrival.tag)
