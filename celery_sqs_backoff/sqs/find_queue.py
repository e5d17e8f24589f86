"""Find a queue as kombu does, for who only looks: from its name in Celery to its URL and client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .calls import Calls
from .clients import token_source
from .errors import Failure, Kind, Operation, failure_of

#: botocore waits 60 s, and tries again, by default. Somebody waits for what the look shows, and
#: an SQS that does not answer is what it has to show.
_SOON: Final = {"connect_timeout": 5, "read_timeout": 10, "retries": {"total_max_attempts": 2}}

#: No queue on SQS has the name; kombu creates it when somebody declares it.
NOT_CREATED: Final = "QueueDoesNotExist"
#: There are ``predefined_queues``, and it is none of them.
NOT_PREDEFINED: Final = "NotInPredefinedQueues"

#: kombu's exceptions, by name: not all of its versions have both.
_CODES: Final = {
    "DoesNotExistQueueException": NOT_CREATED,
    "UndefinedQueueException": NOT_PREDEFINED,
}


def connection_to_look(app: Any) -> Any:
    """Return a connection as the app's for reading, whose calls to SQS end soon.

    The user's own ``client-config`` has precedence.
    """
    options = app.conf.broker_transport_options or {}
    config = {**_SOON, **(options.get("client-config") or {})}
    return app.connection_for_read(transport_options={"client-config": config})


def find_queue(channel: Any, name: str) -> tuple[str, Callable[[str], Calls]] | Failure:
    """Return a queue's URL, and what makes a port of an URL with the queue's credentials.

    Args:
        channel: kombu's.
        name: as in Celery.
    """
    try:
        url = channel._resolve_queue_url(name)
        client = _client(channel, channel.canonical_queue_name(name))
    except Exception as exc:  # noqa: BLE001  # kombu's, botocore's, or of a user's client
        code = _CODES.get(type(exc).__name__)
        if code is not None:
            return Failure(Kind.NO_QUEUE, code)
        return Failure(Kind.LOCAL, why_not(exc))
    return url, partial(Calls, client)


def why_not(exc: BaseException) -> str:
    """Say why nothing can be looked at, from what kombu raises: a code, and SQS's action.

    Never the exception's text, which may quote a URL with its password.
    """
    cause = exc.__cause__ or exc
    action = getattr(cause, "operation_name", None)
    code = failure_of(cause, Operation.GET_URL).code
    return f"{code} ({action})" if action else code


def _client(channel: Any, name: str) -> Any:
    """kombu's client for a queue, by its name on SQS; queues of the same credentials share one.

    kombu makes one for each predefined queue. That costs up to half a second of CPU: minutes, with
    200 queues.
    """
    queues = channel.predefined_queues
    if name not in queues:
        return channel.sqs()
    made, role = channel._predefined_queue_clients, queues[name].get("sts_role_arn")
    if name not in made and (role or not channel.transport_options.get("sts_role_arn")):
        wanted = _credentials(queues[name])
        twin = next((each for each in made if _credentials(queues[each]) == wanted), None)
        if twin is not None:
            made[name] = made[twin]
        elif role:
            made[name] = _client_of_role(channel, queues[name], role)
    return made[name] if role else channel.sqs(queue=name)


def _client_of_role(channel: Any, queue: Any, role: str) -> Any:
    """As workers do: kombu knows no role of one queue alone."""
    token = token_source(channel, role)()
    keys = (token[key] for key in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
    return channel.new_sqs_client(queue.get("region", channel.region), *keys)


def _credentials(queue: Any) -> tuple[Any, ...]:
    keys = ("region", "access_key_id", "secret_access_key", "sts_role_arn")
    return tuple(queue.get(key) for key in keys)
