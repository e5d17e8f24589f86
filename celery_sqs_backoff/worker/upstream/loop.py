"""A guard of Celery's event loop."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def wake_event_loop(hub: Any) -> Callable[[], None]:
    """Let ``hub.call_soon`` interrupt the event loop while it waits for events.

    Without this, a callback waits until something else happens. kombu 5.5 and 5.6 never wake the
    loop. kombu 5.7 does not if the loop itself asks, in a callback or a timer, because
    ``Hub.create_loop`` looks for callbacks before it calls those. Call this again after the loop
    was reset.

    Returns:
        A function that wakes the loop and takes no lock. Signal handlers may call it;
        ``call_soon`` takes a lock that the interrupted code may hold.
    """
    loop_end, thread_end = socket.socketpair()
    loop_end.setblocking(False)
    thread_end.setblocking(False)
    call_soon = type(hub).call_soon

    def wake() -> None:
        with suppress(OSError):  # full, so the loop will wake up anyway; or the loop has ended
            thread_end.send(b"x")

    def call_soon_and_wake(*args: Any) -> Any:
        promise = call_soon(hub, *args)
        wake()
        return promise

    def sleep_again() -> None:
        with suppress(OSError):
            if not loop_end.recv(4096):  # the other end is gone: this was called anew
                hub.remove_reader(loop_end)

    hub.add_reader(loop_end, sleep_again)
    hub.call_soon = call_soon_and_wake
    return wake
