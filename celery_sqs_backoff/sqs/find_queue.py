"""Finds the queues of an app, and makes calls on them with the credentials of the app's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .calls import Calls
from .clients import Clients
from .errors import Failure, Kind, Operation, failure_of

#: By default botocore waits 60 s and tries again. Here a person waits for a command, which must
#: report soon that SQS does not answer.
_SOON: Final = {"connect_timeout": 5, "read_timeout": 10, "retries": {"total_max_attempts": 2}}

#: Code of the failure if SQS does not have the queue. The queue may exist later, because
#: kombu creates a queue when an app first declares the queue.
NOT_CREATED: Final = "QueueDoesNotExist"
#: Code of the failure if ``predefined_queues`` is set and does not have the queue.
NOT_PREDEFINED: Final = "NotInPredefinedQueues"


def connection_to_look(app: Any, *, to_write: bool = False) -> Any:
    """Return a connection like the app's own, with short timeouts for calls to SQS.

    The user's own ``client-config`` has precedence.

    Arguments:
        to_write: ``True`` = use the app's connection for writing, and try each call once. Default:
            use the connection for reading.
    """
    options = app.conf.broker_transport_options or {}
    config = {**_SOON, **(options.get("client-config") or {})}
    if to_write and "retries" not in (options.get("client-config") or {}):
        config["retries"] = {"total_max_attempts": 1}  # the redrive itself tries again
    connect = app.connection_for_write if to_write else app.connection_for_read
    return connect(transport_options={"client-config": config})


class QueueFinder:
    """Finds the queues of an app, and makes calls on them. Safe to use from any thread.

    Arguments:
        channel: kombu's channel.
        attempts: how often a call is tried.
    """

    def __init__(self, channel: Any, *, attempts: int = 1) -> None:
        self._channel = channel
        self._clients = Clients(attempts=attempts)
        self._clients.attach(channel)

    @property
    def predefined(self) -> Mapping[str, Mapping[str, Any]]:
        """The app's ``predefined_queues``, by the name that kombu looks them up by."""
        queues: Mapping[str, Mapping[str, Any]] = self._channel.predefined_queues
        return queues

    def urls(self) -> list[str] | Failure:
        """Return the URLs of the predefined queues, or else of all queues that SQS lists.

        SQS lists at most 1,000 queues. kombu's own list is not used, because kombu 5.5 shares that
        list between all connections of the process, so it may have queues of another account.
        """
        if self.predefined:
            return list(dict.fromkeys(str(queue["url"]) for queue in self.predefined.values()))
        return self.calls("").attempt(
            Operation.LIST_QUEUES, lambda client: list(client.list_queues().get("QueueUrls") or ())
        )

    def key(self, name: str) -> str:
        """Return the name by which kombu looks for a queue that Celery calls ``name``."""
        return str(self._channel.canonical_queue_name(name))

    def calls(self, url: str) -> Calls:
        """Return the object for calls on a queue, with the credentials that its workers use."""
        return self._clients.settling(url)

    def find(self, name: str) -> Calls | Failure:
        """Return the object for calls on a queue, or a failure. ``name`` is its name in Celery."""
        if not self.predefined:
            found = self.find_in_sqs(self.key(name))
            is_absent = isinstance(found, Failure) and found.kind is Kind.NO_QUEUE
            return Failure(Kind.NO_QUEUE, NOT_CREATED) if is_absent else found
        queue = self.predefined.get(self.key(name))
        if queue is None:
            return Failure(Kind.NO_QUEUE, NOT_PREDEFINED)
        return self.calls(queue["url"])

    def find_in_sqs(self, name: str) -> Calls | Failure:
        """Ask SQS for a queue by its name on SQS (GetQueueUrl), and return the object for calls."""
        calls = self.calls("")
        url = calls.attempt(
            Operation.GET_URL, lambda client: str(client.get_queue_url(QueueName=name)["QueueUrl"])
        )
        return url if isinstance(url, Failure) else calls.on(url)


def why_not(exc: BaseException) -> str:
    """Return the code of an exception of kombu or SQS, and the action of SQS if it is known.

    The exception's text is left out, because it may quote a URL with a password.
    """
    cause = exc.__cause__ or exc
    action = getattr(cause, "operation_name", None)
    code = failure_of(cause, Operation.GET_URL).code
    return f"{code} ({action})" if action else code
