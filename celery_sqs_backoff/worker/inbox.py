"""Hands received messages to Celery, one after the other, in the thread of Celery's loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from celery.worker import state

from ..observe.health import Pulse
from . import unreadable
from .lease import Lease, State
from .observation import EVENT_LOOP
from .upstream import is_pool_of
from .window import Window

#: A call that gives a task to one of these pools may block. ``solo`` runs the task in the call.
#: ``gevent`` and ``eventlet`` wait in the call while all their greenlets are busy.
_BLOCKING_POOLS = ("solo", "gevent", "eventlet")

#: Longest wait for a message if Celery has no event loop. Celery notices a shutdown between two
#: waits.
_WAIT_SECONDS = 0.5


class Inbox:
    """Received messages that wait until Celery's event loop takes them.

    If Celery has no event loop (as on Windows), Celery calls :meth:`drain_events` instead.

    Attributes:
        channel: kombu's channel; ``None`` until the worker has connected.
        one_at_a_time: whether a task blocks Celery's event loop if no process (or greenlet) is
            free for it. If so, the inbox gives Celery one task at a time, when one is free.
    """

    def __init__(self, consumer: Any, window: Window, pulse: Pulse) -> None:
        self.channel: Any = None
        self._window, self._hub, self._pulse = window, consumer.hub, pulse
        self._worker: str = consumer.hostname
        self.one_at_a_time = any(is_pool_of(consumer.pool, name) for name in _BLOCKING_POOLS)
        self._cond = threading.Condition()
        self._leases: deque[Lease] = deque()
        self._will_drain = False
        window.on_freed = self.wake

    def put(self, lease: Lease) -> None:
        """Add a message. Safe in any thread."""
        with self._cond:
            self._leases.append(lease)
            self._cond.notify()
        self.wake()

    def wake(self) -> None:
        """Let Celery's event loop deliver the messages that can start. Safe in any thread.

        Raises:
            Exception: the event loop has refused the callback.
        """
        with self._cond:
            if self._hub is None:
                self._cond.notify()
                return
            if self._will_drain or not self._leases:
                return
            self._will_drain = True
        try:
            # Look up call_soon each time, because wake_event_loop replaces it at each (re)connect.
            self._hub.call_soon(self._drain)
        except BaseException:  # without this reset, no later call would wake the loop
            self._will_drain = False
            raise

    def clear(self) -> None:
        """Drop all waiting messages. The caller must give them back to SQS."""
        with self._cond:
            self._leases.clear()
            self._will_drain = False

    def drain_events(self) -> None:
        """Wait at most half a second for a message. Then deliver each message that can start.

        Raises:
            TimeoutError: no message can start.
        """
        self._pulse.note_turn(EVENT_LOOP)
        with self._cond:
            if not self._can_deliver():
                self._cond.wait(_WAIT_SECONDS)
            if not self._can_deliver():
                raise TimeoutError
        while self._can_deliver():
            self._deliver()

    def _drain(self) -> None:
        try:
            while self._can_deliver():
                self._deliver()
                if self.one_at_a_time:
                    break
        finally:
            with self._cond:
                self._will_drain = False
            if self._can_deliver():
                self.wake()

    def _can_deliver(self) -> bool:
        if not self._leases or is_stopping():
            return False
        return not self.one_at_a_time or self._window.has_free_process

    def _deliver(self) -> None:
        """Give a message to Celery, or continue with a message that waited for its provider.

        If Celery or kombu fails to take the message, hide it. At the last receive that its queue
        allows, and shortly before its retention period ends, send it to the dead-letter queue
        instead. But leave the message alone if it is already settled (for example deleted), or if
        its task may be running.
        """
        try:
            lease = self._leases.popleft()
        except IndexError:  # another thread has cleared the inbox
            return
        if lease.state is not State.HELD:
            return  # the worker gave it back, or lost it, while it waited
        try:
            connection = self.channel.connection
            if lease.go_on is not None:
                lease.go_on()
            elif lease.source not in connection._callbacks:
                # The user has told the worker to stop consuming the queue of this message
                # ("cancel_consumer"). kombu would reject the message on the first channel that it
                # finds, which may not be ours.
                lease.give_back()
            else:
                connection._deliver(lease.payload, lease.source)
        except Exception as exc:  # noqa: BLE001  # one bad message must not hold up the others
            if not lease.is_settled() and not lease.handed_to_pool():
                what = f"its headers or its body cannot be used ({type(exc).__name__})"
                headers = lease.payload["headers"] if lease.payload else {}
                unreadable.keep(lease, headers, what, worker=self._worker)
        if lease.state is State.HELD and not lease.keeps_place:
            self._window.blocked(lease)


def is_stopping() -> bool:
    """Return whether Celery is shutting down.

    During a shutdown, one of Celery's two flags is True or an exit code. The exit code may be 0.
    """
    stop, terminate = state.should_stop, state.should_terminate
    return not ((stop is None or stop is False) and (terminate is None or terminate is False))
