"""The SQS of a Celery app: its credentials, region, endpoint and predefined queues."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import OperationalError

from ..limits import DEFAULT_VISIBILITY_TIMEOUT_SECONDS
from ..queues import Queue, error_code, settling_client
from .errors import RedriveError, RedriveRefused, unreachable

if TYPE_CHECKING:
    from celery import Celery
    from mypy_boto3_sqs import SQSClient

__all__ = ["EXPIRED_CREDENTIALS", "Broker", "Depth", "Endpoint", "broker_of"]

EXPIRED_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}

_MISSING = {"NonExistentQueue", "QueueDoesNotExist"}


@dataclass(frozen=True)
class Depth:
    """How many messages a queue has, as far as SQS knows."""

    visible: int
    hidden: int
    delayed: int

    @property
    def total(self) -> int:
        return self.visible + self.hidden + self.delayed


class Endpoint:
    """A queue, and a client that may use it.

    The client tries each call once: what to do about a lost answer is the caller's business.
    """

    def __init__(self, broker: Broker, url: str, key: str | None) -> None:
        self.url = url
        self._broker = broker
        self._key = key  # in predefined_queues, whose entries can have credentials of their own

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def is_fifo(self) -> bool:
        return self.url.endswith(".fifo")

    @property
    def client(self) -> SQSClient:
        return self._broker.client(self._key)

    def sibling(self, name: str) -> Endpoint:
        """Another queue of the same account and Region."""
        return Endpoint(self._broker, f"{self.url.rpartition('/')[0]}/{name}", self._key)

    def read(self) -> Queue:
        """Ask SQS for the queue's attributes.

        Raises:
            RedriveRefused: there is no such queue.
            RedriveUnreachable: SQS does not answer or does not let us.
        """
        found = self._attributes()
        redrive = json.loads(found.get("RedrivePolicy") or "{}")
        retention = found.get("MessageRetentionPeriod")
        return Queue(
            self.url,
            visibility_timeout_seconds=int(
                found.get("VisibilityTimeout", DEFAULT_VISIBILITY_TIMEOUT_SECONDS)
            ),
            retention_seconds=None if retention is None else int(retention),
            max_receive_count=int(redrive["maxReceiveCount"]) if redrive else None,
            arn=found.get("QueueArn"),
            dlq_arn=redrive.get("deadLetterTargetArn"),
        )

    def depth(self) -> Depth:
        """Ask SQS how many messages there are. Raises what :meth:`read` does."""
        found = self._attributes()
        stem = "ApproximateNumberOfMessages"
        visible, hidden, delayed = (
            int(found.get(stem + kind, 0)) for kind in ("", "NotVisible", "Delayed")
        )
        return Depth(visible, hidden, delayed)

    def sources(self) -> list[str]:
        """URLs of the queues that have this one as their dead-letter queue.

        Where SQS does not say (denied, or a local server that does not know the call): of the
        app's predefined queues.
        """
        try:
            answer = self.client.list_dead_letter_source_queues(QueueUrl=self.url)
        except (ClientError, BotoCoreError):
            return [queue.url for queue in self._broker.predefined_with_dlq(self.name)]
        return list(answer.get("queueUrls", ()))

    def _attributes(self) -> dict[str, str]:
        with _ours(f"Cannot read the attributes of queue {self.name}"):
            answer = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])
            return dict(answer["Attributes"])  # type: ignore[arg-type]  # keys are text


class Broker:
    """From a queue's name, URL or ARN to an :class:`Endpoint`. Use :func:`broker_of`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._clients: dict[str | None, tuple[Any, SQSClient]] = {}

    def client(self, key: str | None) -> SQSClient:
        """Copy kombu's client for a predefined queue, or for all queues (``None``).

        kombu makes another when its STS credentials have expired; then so do we.
        """
        with self._lock:
            kombu_client = self._channel.sqs(queue=key)
            source, client = self._clients.get(key, (None, None))
            if client is None or source is not kombu_client:
                client = settling_client(kombu_client)
                self._clients[key] = (kombu_client, client)
            return client

    def find(self, name: str) -> Endpoint:
        """Find a queue by its name (as in Celery, or as in SQS), URL or ARN.

        Raises:
            RedriveRefused: there is no such queue.
            RedriveUnreachable: SQS does not answer or does not let us.
        """
        predefined: dict[str, Any] = self._channel.predefined_queues
        wanted = name.rpartition(":")[2] if name.startswith("arn:") else name
        for key, queue in predefined.items():
            if wanted in (key, queue["url"], queue["url"].rpartition("/")[2]):
                return Endpoint(self, queue["url"], key)
        if "://" in wanted:
            return self._existing(Endpoint(self, wanted, None))
        for endpoint in self.predefined_with_dlq(wanted):  # its credentials serve both
            return endpoint.sibling(wanted)
        for candidate in dict.fromkeys((self._channel.canonical_queue_name(wanted), wanted)):
            if url := self._url(candidate):
                return Endpoint(self, url, None)
        raise _no_such_queue(name)

    def predefined_with_dlq(self, name: str) -> Iterator[Endpoint]:
        """The app's predefined queues that have the dead-letter queue of this name."""
        for key, queue in self._channel.predefined_queues.items():
            endpoint = Endpoint(self, queue["url"], key)
            try:
                dlq_arn = endpoint.read().dlq_arn
            except RedriveError:
                continue  # one of many, and not the one that was asked for
            if dlq_arn and dlq_arn.rpartition(":")[2] == name:
                yield endpoint

    def _existing(self, endpoint: Endpoint) -> Endpoint:
        endpoint.read()
        return endpoint

    def _url(self, name: str) -> str | None:
        try:
            with _ours(f"Cannot look for queue {name}"):
                return self.client(None).get_queue_url(QueueName=name)["QueueUrl"]
        except RedriveRefused:
            return None


@contextmanager
def broker_of(app: Celery, *, connections: int = 20) -> Iterator[Broker]:
    """Connect as the app does, with ``connections`` HTTP connections at a time.

    Raises:
        RedriveRefused: the app's broker is not SQS.
        RedriveUnreachable: SQS does not answer.
    """
    options = app.conf.broker_transport_options or {}
    config = {**(options.get("client-config") or {}), "max_pool_connections": connections}
    with app.connection_for_write(transport_options={"client-config": config}) as connection:
        if connection.transport.driver_type != "sqs":
            raise RedriveRefused(
                f"The app's broker is {connection.transport.driver_type}, not SQS: there is no"
                " dead-letter queue to redrive. Check the app (-A) and its broker_url."
            )
        with _ours("Cannot connect to SQS"):
            try:
                channel = connection.channel()
            except OperationalError as exc:
                raise exc.__cause__ or exc from None
        yield Broker(channel)


@contextmanager
def _ours(what: str) -> Iterator[None]:
    """Turn botocore's errors into ours: a queue that is not there, or SQS out of reach."""
    try:
        yield
    except RedriveError:
        raise
    except (ClientError, BotoCoreError) as exc:
        if error_code(exc) in _MISSING:
            raise RedriveRefused(f"{what}: there is no such queue") from exc
        raise unreachable(what, exc) from exc


def _no_such_queue(name: str) -> RedriveRefused:
    return RedriveRefused(
        f"There is no queue {name!r} in the account and Region of the app's broker. Give its name,"
        " URL or ARN."
    )
