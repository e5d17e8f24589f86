"""Hands received messages to Celery, in the thread of its loop, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from celery.worker import state

from .lease import Lease
from .observation import EVENT_LOOP
from .upstream import is_pool_of

if TYPE_CHECKING:
    from .receive import Receiver

#: Pools in which handing a task over may wait until it, or another, has ended.
_BLOCKING_POOLS = ("solo", "gevent", "eventlet")

#: Without an event loop, Celery looks at signals between two waits of this length.
_WAIT_SECONDS = 0.5


class Inbox:
    """Messages that wait for Celery's loop, under their leases.

    Arguments:
        receiver: its ``deliver`` gives a message to Celery, in Celery's loop, and does not raise.
            Without a loop, Celery calls :meth:`drain_events` instead.
    """

    def __init__(self, receiver: Receiver) -> None:
        consumer = receiver.consumer
        self._deliver, self._window = receiver.deliver, receiver.window
        self._hub, self._pulse = consumer.hub, receiver.keeper.pulse
        self._one_at_a_time = any(is_pool_of(consumer.pool, name) for name in _BLOCKING_POOLS)
        self._cond = threading.Condition()
        self._leases: deque[Lease] = deque()
        self._will_drain = False
        self._window.on_freed = self.wake

    def put(self, lease: Lease) -> None:
        """Add a message. Safe in any thread."""
        with self._cond:
            self._leases.append(lease)
            self._cond.notify()
        self.wake()

    def wake(self) -> None:
        """Deliver the messages that can start, soon. Safe in any thread.

        Raises:
            Exception: the event loop does not take callbacks.
        """
        with self._cond:
            if self._hub is None:
                self._cond.notify()
                return
            if self._will_drain or not self._leases:
                return
            self._will_drain = True
        try:
            # Looked up at each call, because wake_event_loop replaces it at each (re)connect.
            self._hub.call_soon(self._drain)
        except BaseException:  # raised again: without the reset no later message would ask
            self._will_drain = False
            raise

    def clear(self) -> None:
        """Drop all waiting messages. The caller gives their leases back."""
        with self._cond:
            self._leases.clear()
            self._will_drain = False

    def drain_events(self) -> None:
        """Wait briefly for a message, then deliver everything that can be delivered.

        Raises:
            TimeoutError: no message arrived.
        """
        self._pulse.note_turn(EVENT_LOOP)
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
        if not self._leases or is_stopping():
            return False
        return not self._one_at_a_time or self._window.has_free_process

    def _deliver_one(self) -> None:
        try:
            lease = self._leases.popleft()
        except IndexError:  # cleared by another thread
            return
        self._deliver(lease)


def is_stopping() -> bool:
    """Return whether Celery is shutting down. Its flags hold True or an exit code, maybe 0."""
    stop, terminate = state.should_stop, state.should_terminate
    return not ((stop is None or stop is False) and (terminate is None or terminate is False))
