"""Turns the body of an SQS message into a payload for kombu, or says why that is not possible.

A payload is kombu's dict with the headers, the properties and the encoded body of a task. kombu and
Celery do not check the types in it. A list in place of a dict would end each worker that receives
the message. If another program (such as S3) has sent the message, an adapter of the app may make a
task of its body.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from kombu.utils.imports import symbol_by_name
from kombu.utils.json import loads as kombu_loads

from ..foreign import IGNORE, Adapter
from ..text import nests_too_deep, read_body

#: Stands for a payload if the app's adapter says that a message needs no task.
IGNORED: Final[dict[str, Any]] = {}

#: The headers that the worker's own code reads, and their types. Each may be missing or ``None``.
#: https://docs.celeryq.dev/en/stable/internals/protocol.html
_HEADERS: Final[dict[str, type | tuple[type, ...]]] = {
    "task": str,
    "id": str,
    "shadow": str,
    "eta": (str, datetime),
    "expires": (str, datetime),
    "retries": int,
    "timelimit": (list, tuple),
    "stamped_headers": list,
    "stamps": dict,
}


#: A time limit must be below this number of seconds, because timers fail with very large numbers.
_MOST_SECONDS: Final = 1e9


class NotUnderstood(Exception):
    """The body cannot become a task. The error's text says why, and quotes nothing of the body."""


class Payloads:
    """Makes the payloads of the messages that one worker receives.

    Arguments:
        consumer: Celery's consumer. The setting ``foreign`` of its app maps the name of a queue in
            Celery to an adapter. An adapter is a callable, or the import string of a callable.
    """

    def __init__(self, consumer: Any) -> None:
        settings = consumer.app.conf.get("sqs_backoff") or {}
        self._consumer = consumer
        self._adapters: dict[str, Adapter] = {
            queue: symbol_by_name(adapter) if isinstance(adapter, str) else adapter
            for queue, adapter in (settings.get("foreign") or {}).items()
        }

    def read(self, queue: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the payload of a message, as kombu has sent it or as the queue's adapter makes it.

        Return ``IGNORED`` if the adapter says that the message needs no task.

        Raises:
            NotUnderstood: kombu has not sent the message, and no adapter makes a task of it.
        """
        try:
            return celery_payload(message["Body"])
        except NotUnderstood:
            if queue not in self._adapters:
                raise
        attributes = {
            name: value.get("StringValue", value.get("BinaryValue"))
            for name, value in (message.get("MessageAttributes") or {}).items()
        }
        try:
            call = self._adapters[queue](message["Body"], attributes)
        except BaseException as exc:  # noqa: BLE001  # the adapter may call sys.exit()
            raise NotUnderstood(f"the adapter raised {type(exc).__name__}") from None
        if call is None:
            raise NotUnderstood("the adapter does not understand it")
        if call is IGNORE:
            return IGNORED
        try:
            task, args, kwargs = call
            if nests_too_deep([args, kwargs]):  # Python's own limit depends on its version
                raise RecursionError
            if not isinstance(task, str) or task not in self._consumer.strategies:
                raise NotUnderstood("the adapter named a task that is not registered here")
            return self._payload(task, list(args), dict(kwargs), message["MessageId"], queue)
        except NotUnderstood:
            raise
        except Exception as exc:  # noqa: BLE001  # the adapter's objects may raise anything
            raise NotUnderstood(
                "the adapter did not return a (task, args, kwargs) that JSON can encode"
                f" ({type(exc).__name__})"
            ) from None

    def _payload(
        self, task: str, args: list[Any], kwargs: dict[str, Any], task_id: str, queue: str
    ) -> dict[str, Any]:
        """Return the payload of a task, as Celery would have sent it.

        The message ID serves as the task ID, so that the task ID is the same at each receive.
        """
        sent = self._consumer.app.amqp.as_task_v2(
            task_id,
            task,
            args,
            kwargs,
            # Celery logs these texts. They must not show the arguments, which are user data.
            argsrepr="(...)",
            kwargsrepr="{...}",
            origin=self._consumer.hostname,
            ignore_result=None,  # the task's option counts; in Celery 5.7 False would override it
        )
        return {
            "body": base64.b64encode(json.dumps(sent.body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": sent.headers,
            "properties": {
                **sent.properties,
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
            },
        }


def celery_payload(body: str) -> dict[str, Any]:
    """Return the payload in a body that kombu has written.

    Raises:
        NotUnderstood: kombu's fields are missing, or do not describe a task.
    """
    found = read_body(body, kombu_loads)
    if found is None or "properties" not in found or "body" not in found:
        raise NotUnderstood("it is not a Celery message")
    check_headers(_dict(found, "headers"))
    _dict(_dict(found, "properties"), "delivery_info")
    return found


def check_headers(headers: Mapping[str, Any]) -> None:
    """Check the types of the headers that the worker's own code relies on.

    Raises:
        NotUnderstood: a header is of the wrong type, or a time limit is no number of seconds.
    """
    for name, types in _HEADERS.items():
        value = headers.get(name)
        if value is not None and not isinstance(value, types):
            raise NotUnderstood(f"its header {name} is of type {type(value).__name__}")
    # The pool makes timers of the time limits, in Celery's loop. A bad limit would end the worker.
    if not all(limit is None or _is_time(limit) for limit in headers.get("timelimit") or ()):
        raise NotUnderstood("its header timelimit is not a pair of numbers of seconds")


def _is_time(value: Any) -> bool:
    """Return whether a value is a number of seconds that a timer accepts."""
    return isinstance(value, int | float) and 0 <= value < _MOST_SECONDS


def check_call(payload: Any) -> None:
    """Check the types of a task's arguments before Celery gives the task to the pool.

    Celery itself would fail on wrong types in the pool. The pools gevent, eventlet and threads do
    not report that failure, so the worker would hold the message for ever. If Celery took
    such a failure for a success, the worker would even delete the message.

    Arguments:
        payload: the decoded body of the task.

    Raises:
        NotUnderstood: these are not the arguments of a task, or a header field in the body (in
            Celery's protocol 1) is of the wrong type.
    """
    embed: Any = None
    if isinstance(payload, dict):  # in Celery's protocol 1 the headers are fields of the body
        check_headers(payload)
        args, kwargs = payload.get("args", ()), payload.get("kwargs", {})
    else:
        args, kwargs, embed = payload
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise NotUnderstood("its arguments are not a list and a dict")
    if not isinstance(embed, dict | None):
        raise NotUnderstood("its third part is not a dict of callbacks, chain and chord")


def _dict(of: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the dict in the field ``name`` of a dict. If it is missing or empty, put one there."""
    part = of[name] = of.get(name) or {}
    if not isinstance(part, dict):
        raise NotUnderstood(f"its field {name} is of type {type(part).__name__}")
    return part
