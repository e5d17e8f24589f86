"""Guards of how messages are received."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty
from typing import Any
from weakref import WeakSet

from botocore.exceptions import BotoCoreError, ClientError

from ...queues import error_code

__all__ = [
    "ORIGINAL_BODY",
    "ask_for_attributes",
    "declare_without_leave_to_look",
    "survive_bodies_without_json",
    "survive_failed_receives",
]


#: Where :func:`ask_for_attributes` keeps the body of a message that kombu decodes in its place.
ORIGINAL_BODY = "OriginalBody"


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


def survive_bodies_without_json(channel: Any) -> None:
    """Receive a message whose body is no JSON object, as one that is not Celery's.

    kombu 5.5: it ends the worker, and the next one that receives it (kombu#2421).
    """
    if hasattr(channel, "_prepare_json_payload"):
        return  # kombu 5.6 and later
    parse = channel._message_to_python

    def message_to_python(message: dict[str, Any], queue_name: str, queue_url: str) -> Any:
        try:
            return parse(message, queue_name, queue_url)
        except (TypeError, ValueError, AttributeError):
            delivery_info = {"sqs_message": message, "sqs_queue": queue_url}
            return {
                "body": message["Body"],
                "properties": {
                    "delivery_info": delivery_info,
                    "delivery_tag": message["ReceiptHandle"],
                },
            }

    channel._message_to_python = message_to_python


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
