"""Bugs of Celery and kombu that stop a worker on SQS: one guard each, on the instances at hand.

Each says which versions it is for; on others it changes nothing that works.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty
from typing import Any
from weakref import WeakSet

from botocore.exceptions import BotoCoreError, ClientError
from celery.worker import state
from kombu.asynchronous import get_event_loop, set_event_loop

from ..queues import error_code
from .lease import State

__all__ = [
    "ORIGINAL_BODY",
    "ask_for_attributes",
    "declare_without_leave_to_look",
    "give_back_before_soft_shutdown",
    "keep_event_loop",
    "run_after_receiving",
    "survive_failed_receives",
]


#: Where :func:`ask_for_attributes` keeps the body of a message that kombu decodes in its place.
ORIGINAL_BODY = "OriginalBody"


def keep_event_loop(consumer: Any) -> None:
    """After a broker error: let the next channel find the event loop.

    Celery 5.7.0 with kombu 5.7.0: the loop's error path calls ``hub.reset()``, which unsets the
    current event loop (kombu#2404), so the new channel has none, and never polls. The worker
    says "Connected" and receives nothing for ever.
    """
    if consumer.hub is not None and get_event_loop() is None:
        set_event_loop(consumer.hub)


def survive_failed_receives(channel: Any, on_result: Callable[[str | None], None]) -> None:
    """Take a ReceiveMessage that fails for one that returns nothing.

    All versions: a 4xx (expired credentials, kombu#2031) raises a bare ``Exception`` in the event
    loop and ends the worker; without an event loop so does any ``ClientError``. kombu 5.7.0: a 5xx
    or a timeout does too (``AttributeError: 'list' object has no attribute 'get'``).

    Arguments:
        channel: kombu's channel.
        on_result: told after each receive what went wrong, ``None`` for nothing.
    """
    if channel.hub is None:
        _survive_blocking(channel, on_result)
        return

    def survive(connection: Any) -> None:
        parse = connection._on_list_ready

        def on_list_ready(parent: Any, markers: Any, operation: str, response: Any) -> Any:
            if response.status == 200:
                on_result(None)
                return parse(parent, markers, operation, response)
            on_result(f"HTTP {response.status} {_code(response)}".rstrip())
            return {}

        connection._on_list_ready = on_list_ready

    _change_connections(channel, survive)


def _survive_blocking(channel: Any, on_result: Callable[[str | None], None]) -> None:
    get_bulk = channel._get_bulk

    def surviving_get_bulk(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = get_bulk(*args, **kwargs)
        except Empty:
            on_result(None)
            raise
        except (ClientError, BotoCoreError) as exc:
            on_result(error_code(exc))
            raise Empty from exc
        on_result(None)
        return answer

    channel._get_bulk = surviving_get_bulk
    channel._reset_cycle()  # it holds the method


def declare_without_leave_to_look(consumer: Any) -> None:
    """Let a worker start that may not read its queues' attributes.

    All versions: kombu asks how long a queue is when it declares it (``Channel._size``), does
    nothing with the answer, and an AccessDenied there ends the worker.
    """
    connect = consumer.connect

    def connect_and_guard() -> Any:
        connection = connect()
        channel = connection.default_channel
        size = channel._size

        def size_if_allowed(queue: str) -> int:
            try:
                return int(size(queue))
            except ClientError:
                return 0

        channel._size = size_if_allowed
        return connection

    consumer.connect = connect_and_guard


def ask_for_attributes(channel: Any, wanted: Mapping[str, Sequence[str]]) -> None:
    """Ask for these attributes in every ReceiveMessage, beside those that kombu asks for.

    kombu has ``fetch_message_attributes`` for it, but before 5.6 that is a list of another form,
    cannot name message attributes, and is not heeded without an event loop. There, all versions
    also decode the body in its place if it is base64, so that it cannot be sent on as it was.

    Arguments:
        channel: kombu's channel.
        wanted: ReceiveMessage's parameters of that kind.
    """

    def merge(params: dict[str, Any]) -> dict[str, Any]:
        params.pop("AttributeNames", None)  # the older name of MessageSystemAttributeNames
        asked = {name: list(params.get(name) or ()) for name in wanted}
        return params | {name: [*{*asked[name], *wanted[name]}] for name in wanted}

    def receive(receive_message: Callable[..., Any], **params: Any) -> Any:
        answer = receive_message(**merge(params))
        for message in answer.get("Messages", ()):
            message[ORIGINAL_BODY] = message["Body"]
        return answer

    if channel.hub is None:
        make_client = channel.sqs

        def sqs(*args: Any, **kwargs: Any) -> Any:
            client = make_client(*args, **kwargs)
            if "receive_message" not in vars(client):
                client.receive_message = partial(receive, client.receive_message)
            return client

        channel.sqs = sqs
        return

    def ask(connection: Any) -> None:
        get_list = connection.get_list

        def get_list_with_attributes(operation: str, params: Any, *args: Any, **kwargs: Any) -> Any:
            if operation == "ReceiveMessage":
                by_protocol = kwargs.get("protocol_params") or {}
                kwargs["protocol_params"] = by_protocol | {"json": merge(by_protocol["json"])}
            return get_list(operation, params, *args, **kwargs)

        connection.get_list = get_list_with_attributes

    _change_connections(channel, ask)


def _change_connections(channel: Any, change: Callable[[Any], None]) -> None:
    """Apply a change once to each asynchronous connection to SQS that the channel makes."""
    make, changed = channel.asynsqs, WeakSet[Any]()

    def asynsqs(queue: str | None = None) -> Any:
        connection = make(queue)
        if connection not in changed:
            changed.add(connection)
            change(connection)
        return connection

    channel.asynsqs = asynsqs


def _code(response: Any) -> str:
    """The error code in SQS's JSON answer, if it is one."""
    try:
        return str(json.loads(response.read())["__type"]).rpartition("#")[2]
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def run_after_receiving(consumer: Any) -> None:
    """On solo and gevent: run a task only when the whole batch it came in has been taken in.

    All versions: there the callback that receives a message does not return before its task has
    ended (solo) or has a greenlet (gevent, whose pool blocks while it is full). So the messages
    behind it in the batch would stay unknown, and unrenewed. (It is so on eventlet, too, which
    Celery advises against; there this guard kept a worker from ending.)
    """
    handle, hub = consumer.on_task_request, consumer.hub
    waiting: deque[Any] = deque()

    running = False

    def run_waiting() -> None:
        nonlocal running
        try:
            while waiting:
                if hub is None:
                    consumer.pool._pool.wait_available()  # gevent: until a greenlet is free
                request = waiting.popleft()
                if not _is_stopping() and _is_ours(request):
                    handle(request)
        finally:
            running = False

    def on_task_request(request: Any) -> None:
        nonlocal running
        waiting.append(request)
        if running:
            return
        running = True
        if hub is None:
            consumer.timer.call_after(0, run_waiting)  # in a greenlet of its own
        else:
            hub.call_soon(run_waiting)

    consumer.on_task_request = on_task_request


def _is_ours(request: Any) -> bool:
    """Whether the request's message is still to be run here."""
    lease = getattr(request, "lease", None)  # other tasks' requests have none
    return lease is None or lease.state is State.HELD


def give_back_before_soft_shutdown(consumer: Any, give_back: Callable[[], object]) -> None:
    """Give back what has not begun before a soft shutdown, not after it.

    Celery 5.5 and later: ``worker_soft_shutdown_timeout`` is slept through in the signal handler,
    before any step of the worker is told to stop.
    """
    controller = consumer.controller
    wait = controller.wait_for_soft_shutdown

    def give_back_and_wait() -> None:
        # In a thread: the code that the signal has interrupted may hold a lease's lock.
        threading.Thread(target=give_back, daemon=True).start()
        wait()

    controller.wait_for_soft_shutdown = give_back_and_wait


def _is_stopping() -> bool:
    """As Celery tells: an exit code, which may be 0, or True."""
    codes = (state.should_stop, state.should_terminate)
    return any(code is not None and code is not False for code in codes)
