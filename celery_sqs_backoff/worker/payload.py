"""Reads the body of an SQS message as a payload for kombu, and refuses any other body.

A payload is kombu's dict with the headers, the properties and the encoded body of a task. kombu and
Celery do not check the types in it. A list in place of a dict would end each worker that receives
the message. If Celery has not sent the message, an adapter of the app may make a task of its body.
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

#: The payload of a message that needs no task.
IGNORED: Final[dict[str, Any]] = {}

#: The types of headers that the worker's own code relies on. ``None`` is legal for each.
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


#: A time limit must be below this number of seconds, because timers fail with too large numbers.
_MOST_SECONDS: Final = 1e9


class NotUnderstood(Exception):
    """The body is not a task message. The text says why, without a word of the body."""


class Payloads:
    """Reads the messages of one worker.

    Arguments:
        consumer: Celery's consumer. The setting ``foreign`` of its app has the adapters by the
            queue's name in Celery. Each adapter is a callable, or the import string of a callable.
    """

    def __init__(self, consumer: Any) -> None:
        settings = consumer.app.conf.get("sqs_backoff") or {}
        self._consumer = consumer
        self._adapters: dict[str, Adapter] = {
            queue: symbol_by_name(adapter) if isinstance(adapter, str) else adapter
            for queue, adapter in (settings.get("foreign") or {}).items()
        }

    def read(self, queue: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the payload that kombu has sent, or else the payload from the queue's adapter.

        It is ``IGNORED`` if the adapter says that the message needs no task.

        Raises:
            NotUnderstood: the message has no payload of kombu, and no adapter makes a payload.
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
        except BaseException as exc:  # noqa: BLE001  # even sys.exit() must not end the poller
            raise NotUnderstood(f"the adapter raised {type(exc).__name__}") from None
        if call is None:
            raise NotUnderstood("the adapter does not understand it")
        if call is IGNORE:
            return IGNORED
        try:
            task, args, kwargs = call
            if nests_too_deep([args, kwargs]):  # from Python 3.13 on, json encodes any depth
                raise RecursionError
            if not isinstance(task, str) or task not in self._consumer.strategies:
                raise NotUnderstood("the adapter named a task that is not registered here")
            return self._payload(task, list(args), dict(kwargs), message["MessageId"], queue)
        except NotUnderstood:
            raise
        except Exception as exc:  # noqa: BLE001  # the result may raise anything, or be nested too deep
            raise NotUnderstood(
                f"the adapter returned no (task, args, kwargs) in JSON ({type(exc).__name__})"
            ) from None

    def _payload(
        self, task: str, args: list[Any], kwargs: dict[str, Any], task_id: str, queue: str
    ) -> dict[str, Any]:
        """Return the payload of a task, as Celery would have sent it.

        The task ID is the message ID, so it is the same at each receive.
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
            ignore_result=None,  # the task decides; in Celery 5.7 False would overrule it
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
    """Read a message that kombu has sent.

    Raises:
        NotUnderstood: kombu's fields are missing, or do not describe a task.
    """
    found = read_body(body, kombu_loads)
    if found is None or "properties" not in found or "body" not in found:
        raise NotUnderstood("it is no Celery message")
    check_headers(_dict(found, "headers"))
    _dict(_dict(found, "properties"), "delivery_info")
    return found


def check_headers(headers: Mapping[str, Any]) -> None:
    """Check the types of the headers that the worker's own code relies on.

    Raises:
        NotUnderstood: one of them is of the wrong type, or a time limit is no number of seconds.
    """
    for name, types in _HEADERS.items():
        value = headers.get(name)
        if value is not None and not isinstance(value, types):
            raise NotUnderstood(f"its header {name} is of type {type(value).__name__}")
    # The pool makes timers of the time limits, in Celery's loop. A bad limit would end the worker.
    if not all(limit is None or _is_time(limit) for limit in headers.get("timelimit") or ()):
        raise NotUnderstood("its header timelimit is no pair of seconds")


def _is_time(value: Any) -> bool:
    """Return whether a value is a number of seconds that a timer accepts."""
    return isinstance(value, int | float) and 0 <= value < _MOST_SECONDS


def check_call(payload: Any) -> None:
    """Refuse arguments that would make Celery fail in the pool, before the task's own code.

    The pools gevent, eventlet and threads do not report this failure, so the worker would hold the
    message for ever. If Celery takes the failure for a success, the message would be deleted.

    Arguments:
        payload: the decoded body.

    Raises:
        NotUnderstood: these are not the arguments of a task, or a field of protocol 1 is of the
            wrong type.
    """
    embed: Any = None
    if isinstance(payload, dict):  # protocol 1, where the body has the fields of the headers
        check_headers(payload)
        args, kwargs = payload.get("args", ()), payload.get("kwargs", {})
    else:
        args, kwargs, embed = payload
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise NotUnderstood("its arguments are no list and no dict of keyword arguments")
    if not isinstance(embed, dict | None):
        raise NotUnderstood("its third part is no dict of callbacks, chain and chord")


def _dict(of: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a payload. If it is missing or empty, put an empty dict there first."""
    part = of[name] = of.get(name) or {}
    if not isinstance(part, dict):
        raise NotUnderstood(f"its {name} are of type {type(part).__name__}")
    return part
