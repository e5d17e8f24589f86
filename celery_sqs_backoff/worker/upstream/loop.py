"""Guards of Celery's event loop."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from typing import Any

from kombu.asynchronous import get_event_loop, set_event_loop
from kombu.asynchronous.http import get_client
from kombu.exceptions import HttpError

__all__ = ["call_beside_event_loop", "keep_event_loop", "wake_event_loop"]


def keep_event_loop(consumer: Any) -> None:
    """After a broker error: let the next channel find the event loop.

    Celery 5.7.0 with kombu 5.7.0: the loop's error path calls ``hub.reset()``, which unsets the
    current event loop (kombu#2404), so the new channel has none, and never polls. The worker
    says "Connected" and receives nothing for ever.
    """
    if consumer.hub is not None and get_event_loop() is None:
        set_event_loop(consumer.hub)


def wake_event_loop(hub: Any) -> None:
    """Let ``hub.call_soon`` in another thread interrupt the event loop, which waits for events.

    kombu 5.5 and 5.6: what is to be done soon is done when something else has happened, up to a
    second later. To be called anew when the loop has been reset.
    """
    if hasattr(hub, "_create_waker"):
        return  # kombu 5.7 does it
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
            loop_end.recv(4096)

    hub.add_reader(loop_end, sleep_again)
    hub.call_soon = call_soon_and_wake


def call_beside_event_loop(hub: Any) -> None:
    """Call SQS in threads, so that the event loop goes on meanwhile.

    kombu 5.5: its HTTP client is urllib3's instead of pycurl's, and blocks (kombu#2258). Between
    two long polls only would a worker look at signals, timers, and the results of its pool.

    To be called anew when the loop has been reset. Answers to earlier calls are dropped then, as
    pycurl's are: their channel is closed.
    """
    client = get_client(hub)
    if not hasattr(client, "_process_request"):
        return  # pycurl's

    def add_request(request: Any) -> Any:
        on_ready = request.on_ready

        def answer(response: Any) -> None:
            if client.add_request is add_request:
                on_ready(response)

        request.on_ready = lambda response: hub.call_soon(answer, response)
        Thread(target=_call, args=(client, request), name="sqs-receive", daemon=True).start()
        return request

    client.add_request = add_request


def _call(client: Any, request: Any) -> None:
    try:
        client._process_request(request)
    except Exception as exc:  # noqa: BLE001  # unanswered, nobody would poll again
        error = HttpError(599, type(exc).__name__)
        request.on_ready(client.Response(request=request, code=599, error=error))
