"""A guard of Celery's event loop."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

__all__ = ["wake_event_loop"]


def wake_event_loop(hub: Any) -> None:
    """Let ``hub.call_soon`` interrupt the event loop, which is about to wait for events.

    Otherwise what is to be done soon is done when something else has happened, up to a second
    later: on kombu 5.5 and 5.6 always, on 5.7 if the loop itself asks for it, in a callback or a
    timer (``Hub.create_loop`` looks for callbacks before it calls those, not after). To be called
    anew when the loop has been reset.
    """
    loop_end, thread_end = socket.socketpair()
    loop_end.setblocking(False)
    thread_end.setblocking(False)
    call_soon = type(hub).call_soon

    def call_soon_and_wake(*args: Any) -> Any:
        promise = call_soon(hub, *args)
        with suppress(OSError):  # full, so the loop will wake up anyway; or the loop has ended
            thread_end.send(b"x")
        return promise

    def sleep_again() -> None:
        with suppress(OSError):
            if not loop_end.recv(4096):  # the other end is gone: this was called anew
                hub.remove_reader(loop_end)

    hub.add_reader(loop_end, sleep_again)
    hub.call_soon = call_soon_and_wake
