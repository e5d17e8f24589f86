"""From the body of an SQS message to what kombu makes a message of; anything else is refused.

The queue's senders are not trusted: kombu and Celery take the types in an envelope for granted, and
a list where a dict is due would end one worker after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from kombu.utils.json import loads as kombu_loads

from ..sqs.envelope import load_body


class NotUnderstood(Exception):
    """The body is not a task message. The text says why, without a word of the body."""


def celery_payload(body: str) -> dict[str, Any] | None:
    """Read a message that kombu has sent.

    Returns:
        kombu's raw payload, or ``None`` if the body is something else altogether: no JSON object,
        or one without kombu's fields.

    Raises:
        NotUnderstood: it has kombu's fields, but they do not describe a task.
    """
    found = load_body(body, kombu_loads)
    if found is None or "properties" not in found or "body" not in found:
        return None
    headers = found["headers"] = _dict(found.get("headers"), "its headers are")
    properties = found["properties"] = _dict(found["properties"], "its properties are")
    properties["delivery_info"] = _dict(properties.get("delivery_info"), "its delivery_info is")
    check_headers(headers)
    for name, where in _TEXTS:
        value = (found if where is None else properties[where]).get(name)
        if value is not None and not isinstance(value, str):
            raise NotUnderstood(f"its {name} is {_kind(value)}")
    return found


def check_headers(headers: Mapping[str, Any]) -> None:
    """Check the types that Celery's main process takes for granted in headers.

    Raises:
        NotUnderstood: one of them is of the wrong type.
    """
    for name, types in _HEADERS.items():
        value: Any = headers.get(name)
        if value is None:
            continue
        if (
            not isinstance(value, types)
            or (types is int and not _is_number(value, int))
            or (name == "timelimit" and not _is_time_limit(value))
            or (name == "stamped_headers" and not _are_texts(value))
        ):
            raise NotUnderstood(f"its header {name} is {_kind(value)}, or out of range")


def check_call(payload: Any) -> None:
    """Refuse arguments that would make Celery fail in the pool, before the task's own code.

    There gevent, eventlet and threads make no report, so the message would be held, and its place
    taken, as long as the worker lives; and a failure that Celery takes for a success is deleted.

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
    if embed is not None and not (isinstance(embed, dict) and _are_texts(embed)):
        raise NotUnderstood("its third part is no dict of what the task is embedded in")


def _is_number(value: Any, *types: type) -> bool:
    return type(value) in types and 0 <= value < _MAX_NUMBER  # True is an int, too


def _is_time_limit(limits: Any) -> bool:
    if list(limits) == [None, None]:  # as of most messages
        return True
    return len(limits) == 2 and all(
        limit is None or _is_number(limit, int, float) for limit in limits
    )


#: The headers that Celery's main process works with, and the types that it takes for granted.
#: ``None``, or no value, is right for all of them.
#: https://docs.celeryq.dev/en/stable/internals/protocol.html
_HEADERS: Final[dict[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("task", "id", "root_id", "parent_id", "group", "shadow", "lang"), str),
    **dict.fromkeys(("argsrepr", "kwargsrepr", "origin"), str),
    **dict.fromkeys(("eta", "expires"), (str, datetime)),
    **dict.fromkeys(("retries", "replaced_task_nesting"), int),
    **dict.fromkeys(("timelimit",), (list, tuple)),
    **dict.fromkeys(("ignore_result",), bool),
    **dict.fromkeys(("stamped_headers",), list),
    **dict.fromkeys(("stamps",), dict),
}

#: The texts outside of the headers, and where in the properties they are.
_TEXTS: Final = (
    ("content-type", None),
    ("content-encoding", None),
    ("exchange", "delivery_info"),
    ("routing_key", "delivery_info"),
)

#: More than any count of retries, or than any time limit in seconds.
_MAX_NUMBER: Final = 1_000_000


def _are_texts(values: Any) -> bool:
    return set(map(type, values)) <= {str}


def _dict(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotUnderstood(f"{what} {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
