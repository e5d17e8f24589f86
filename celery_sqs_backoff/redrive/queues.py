"""The queues of a Celery app's SQS: its credentials, Region, endpoint and predefined queues.

A queue is resolved once, strictly: what counts is the ARN that SQS itself gives it. Reads are
retried. Only one error of a helper call is forgiven: that the server does not know the call.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kombu.exceptions import OperationalError

from ..retry.policies import FullJitter
from ..sqs.arns import QueueArn, is_queue_name, region_of
from ..sqs.calls import Calls, Results
from ..sqs.clients import Clients
from ..sqs.errors import Failure, Kind, Operation, failure_of
from .errors import RedriveRefused, RedriveUnreachable, unreachable
from .message import DeadLetter

if TYPE_CHECKING:
    from celery import Celery
    from mypy_boto3_sqs import SQSClient

_TRIES = 6
_BETWEEN_TRIES = FullJitter(base=0.2, cap=5)

#: One long poll asks all of SQS's servers; a short one does not, and can miss messages.
_WAIT_SECONDS = 1


T = TypeVar("T")


def retried(
    call: Callable[[], T | Failure],
    *,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> T | Failure:
    """Make a call that only reads; try again what may succeed later, six times at most."""
    for attempt in range(1, _TRIES):
        found = call()
        if not isinstance(found, Failure) or not found.is_transient:
            return found
        sleep(_BETWEEN_TRIES.delay(attempt, rng or random.Random()))
    return call()


class Endpoint:
    """A queue, and the port to it. Safe for threads. Calls on messages are tried once.

    Attributes:
        arn: the one by which SQS knows it.
        calls: batch calls on it; each is tried once.
        found: its attributes as they were when it was resolved.
    """

    def __init__(
        self,
        broker: Broker,
        url: str,
        key: str | None,
        arn: QueueArn,
        found: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.arn = url, arn
        self.found = found or {}
        self._broker = broker
        self._key = key  # in predefined_queues, whose entries can have credentials of their own
        self.calls = broker.calls(url, key)

    @property
    def name(self) -> str:
        return self.arn.name

    @property
    def is_fifo(self) -> bool:
        return self.arn.is_fifo

    @property
    def client(self) -> SQSClient:
        return self._broker.client(self._key)

    def attributes(self) -> dict[str, str]:
        """Read the queue's attributes.

        Raises:
            RedriveRefused: there is no such queue.
            RedriveUnreachable: SQS does not answer or does not let us.
        """
        found = retried(self.calls.attributes, sleep=self._broker.sleep)
        if isinstance(found, Failure):
            raise _error(f"Cannot read the attributes of queue {self.name}", found)
        return found

    def depth(self) -> int:
        """Ask SQS how many messages there are, hidden and delayed ones included.

        Raises what :meth:`attributes` does.
        """
        found = self.attributes()
        stem, kinds = "ApproximateNumberOfMessages", ("", "NotVisible", "Delayed")
        return sum(int(found.get(stem + kind, 0)) for kind in kinds)

    def receive(self, messages: int, hold_seconds: int) -> list[DeadLetter] | Failure:
        """Receive up to ten messages, with all their attributes, hidden for so many seconds."""
        received = self.calls.receive(
            max_messages=messages,
            wait_seconds=_WAIT_SECONDS,
            visibility_timeout_seconds=hold_seconds,
        )
        if received.failure is not None:
            return received.failure
        return [DeadLetter(message) for message in received.messages]

    def delete(self, handles: Sequence[str]) -> Results:
        """Delete up to ten messages."""
        return self.calls.delete(handles)

    def hide(self, handles: Sequence[str], seconds: int) -> Results:
        """Hide up to ten messages for so many seconds from now; 0 = show them at once."""
        return self.calls.change_visibility([(handle, seconds) for handle in handles])

    def sources(self) -> list[Endpoint]:
        """Return the queues that have this one as their dead-letter queue, as SQS lists them.

        Raises:
            RedriveUnreachable: SQS does not answer or does not let us: without the list it is not
                known where messages may go.
        """
        found = retried(self._listed_sources, sleep=self._broker.sleep)
        if isinstance(found, Failure):
            if found.kind is Kind.UNSUPPORTED:  # a local server
                return list(self._broker.with_dead_letter_queue(self.arn))
            raise _error(f"Cannot list the queues that have dead-letter queue {self.name}", found)
        return [self._broker.listed(url, self.arn) for url in found]

    def _listed_sources(self) -> list[str] | Failure:
        urls: list[str] = []
        request: dict[str, Any] = {"QueueUrl": self.url, "MaxResults": 1000}
        try:
            while True:
                answer: Any = self.client.list_dead_letter_source_queues(**request)
                urls += answer.get("queueUrls") or ()
                if not answer.get("NextToken"):
                    return urls
                request["NextToken"] = answer["NextToken"]
        except Exception as exc:  # noqa: BLE001  # any exception is a result
            return failure_of(exc, Operation.LIST_SOURCES)


class Broker:
    """From a queue's name, URL or ARN to an :class:`Endpoint`. Use :func:`broker_of`."""

    def __init__(
        self,
        channel: Any,
        sleep: Callable[[float], None] = time.sleep,
        *,
        clients: Clients | None = None,
    ) -> None:
        self._channel = channel
        self.sleep = sleep
        self._clients = clients or Clients()
        self._clients.attach(channel)

    def client(self, key: str | None) -> SQSClient:
        """Return the client of a predefined queue, as a worker has it, or of all others."""
        url = "" if key is None else self._channel.predefined_queues[key]["url"]
        return self._clients.settling_client(url)

    def refresh(self, key: str | None) -> None:
        """Make the client anew, with new credentials: the old ones have been refused."""
        self._clients.refresh("" if key is None else self._channel.predefined_queues[key]["url"])

    def calls(self, url: str, key: str | None) -> Calls:
        return Calls(lambda: self.client(key), url, refresh=lambda: self.refresh(key))

    def find(self, name: str) -> Endpoint:
        """Find a queue by its name (as in Celery, or as in SQS), URL or ARN.

        Raises:
            RedriveRefused: there is no such queue in the account and Region of the app's broker.
            RedriveUnreachable: SQS does not answer or does not let us.
        """
        if name.startswith("arn:"):
            try:
                wanted = QueueArn.parse(name)
            except ValueError as exc:
                raise RedriveRefused(f"Invalid queue {name!r}: {exc}") from None
            return self._same(self._named(wanted.name, name, wanted), wanted, name)
        if "://" not in name:
            return self._named(name, name)
        url = urlsplit(name)
        parts = url.path.strip("/").split("/")
        found = self._named(parts[-1], name)
        return self._same(
            found,
            QueueArn(
                found.arn.partition,
                region_of(url.hostname or "") or found.arn.region,
                parts[-2] if len(parts) > 1 and parts[-2].isdigit() else found.arn.account,
                parts[-1],
            ),
            name,
        )

    def name_in_sqs(self, name: str) -> str:
        """The name in SQS of a queue that Celery calls so. Makes no call."""
        if (queue := self._channel.predefined_queues.get(name)) is not None:
            return str(queue["url"].rpartition("/")[2])
        return str(self._channel.canonical_queue_name(name))

    def listed(self, url: str, dead_letter_queue: QueueArn) -> Endpoint:
        """A queue that SQS has listed as a source: in the account and Region of the DLQ."""
        name = url.rpartition("/")[2]
        arn = dead_letter_queue.sibling(name)
        for key, queue in self._channel.predefined_queues.items():
            if queue["url"].rpartition("/")[2] == name:
                found = self._existing(queue["url"], key)
                if found is not None and found[0].arn == arn:  # not its namesake elsewhere
                    return found[0]
        return Endpoint(self, url, None, arn)

    def with_dead_letter_queue(self, arn: QueueArn) -> Iterator[Endpoint]:
        """The queues with this dead-letter queue, on a server that does not list them."""
        seen: set[QueueArn] = set()
        for key, queue in self._channel.predefined_queues.items():
            found = self._existing(queue["url"], key)
            if found is not None and found[1] == str(arn) and found[0].arn not in seen:
                seen.add(found[0].arn)
                yield found[0]
        for url in [] if seen else self._urls():
            found = self._existing(url, None)
            if found is not None and found[1] == str(arn):
                yield found[0]

    def _urls(self) -> list[str]:
        def ask() -> list[str] | Failure:
            try:
                answer: Any = self.client(None).list_queues()
            except Exception as exc:  # noqa: BLE001  # any exception is a result
                return failure_of(exc, Operation.LIST_SOURCES)
            return list(answer.get("QueueUrls") or ())

        found = retried(ask, sleep=self.sleep)
        if isinstance(found, Failure):
            raise _error("Cannot list the queues", found)
        return found

    def _named(self, name: str, shown: str, arn: QueueArn | None = None) -> Endpoint:
        in_sqs = name != shown  # of a URL or an ARN: whatever else Celery calls so
        if not is_queue_name(name):
            raise _no_such_queue(shown)
        unread: dict[str, RedriveUnreachable] = {}
        predefined = self._predefined(name, in_sqs) or self._beside_predefined(name, unread)
        if arn is not None and arn in predefined:
            return predefined[arn]
        if len(predefined) > 1:
            raise RedriveRefused(
                f"Queue {shown!r} may be any of {', '.join(map(str, predefined))}: give its ARN."
            )
        if predefined:
            return _certain(next(iter(predefined.values())), arn, unread)
        in_celery = name if in_sqs else self._channel.canonical_queue_name(name)
        for candidate in dict.fromkeys((in_celery, name)):
            if (candidate_url := self._url(candidate)) is not None:
                found = self._existing(candidate_url, None)
                if found is not None:
                    return _certain(found[0], arn, unread)
        raise next(iter(unread.values()), _no_such_queue(shown))

    def _predefined(self, name: str, in_sqs: bool) -> dict[QueueArn, Endpoint]:
        """By the key, or else by the name in the URL, which several Regions can have."""
        queues: dict[str, Any] = self._channel.predefined_queues
        keys = [key for key in queues if key == name and not in_sqs] or [
            key for key, queue in queues.items() if queue["url"].rpartition("/")[2] == name
        ]
        existing = (self._existing(queues[key]["url"], key) for key in keys)
        return {found[0].arn: found[0] for found in existing if found is not None}

    def _beside_predefined(
        self, name: str, unread: dict[str, RedriveUnreachable]
    ) -> dict[QueueArn, Endpoint]:
        """Dead-letter queues of predefined queues, whose credentials serve both.

        ``unread`` gets the URLs where others might be, and why that could not be read.
        """
        siblings: dict[QueueArn, Endpoint] = {}
        for key, queue in self._channel.predefined_queues.items():
            url = f"{queue['url'].rpartition('/')[0]}/{name}"
            try:
                found = self._existing(queue["url"], key)
            except RedriveUnreachable as exc:
                unread[url] = exc
                continue
            if found is not None and found[1] and found[1].rpartition(":")[2] == name:
                sibling = self._existing(url, key)
                if sibling is not None and str(sibling[0].arn) == found[1]:
                    siblings.setdefault(sibling[0].arn, sibling[0])
        return siblings

    def _same(self, found: Endpoint, wanted: QueueArn, shown: str) -> Endpoint:
        if found.arn != wanted:
            raise RedriveRefused(
                f"Queue {shown!r} is not in the account and Region of the app's broker: there,"
                f" {found.name} is {found.arn}."
            )
        return found

    def _existing(self, url: str, key: str | None) -> tuple[Endpoint, str | None] | None:
        """A queue with the ARN of its dead-letter queue; ``None``: there is no such queue."""
        found = retried(self.calls(url, key).attributes, sleep=self.sleep)
        name = url.rpartition("/")[2]
        if isinstance(found, Failure):
            if found.kind is Kind.NO_QUEUE:
                return None
            raise _error(f"Cannot read the attributes of queue {name}", found)
        try:
            arn = QueueArn.parse(found.get("QueueArn"))
        except ValueError as exc:
            raise RedriveRefused(f"SQS gives queue {name} no ARN: {exc}") from None
        policy = json.loads(found.get("RedrivePolicy") or "{}")
        return Endpoint(self, url, key, arn, found), policy.get("deadLetterTargetArn")

    def _url(self, name: str) -> str | None:
        def ask() -> str | Failure:
            try:
                return str(self.client(None).get_queue_url(QueueName=name)["QueueUrl"])
            except Exception as exc:  # noqa: BLE001  # any exception is a result
                return failure_of(exc, Operation.GET_URL)

        found = retried(ask, sleep=self.sleep)
        if not isinstance(found, Failure):
            return found
        if found.kind is Kind.NO_QUEUE:
            return None
        raise _error(f"Cannot look for queue {name}", found)


@contextmanager
def broker_of(app: Celery) -> Iterator[Broker]:
    """Connect as the app does.

    Raises:
        RedriveRefused: the app's broker is not SQS.
        RedriveUnreachable: SQS does not answer.
    """
    with app.connection_for_write() as connection:
        if connection.transport.driver_type != "sqs":
            raise RedriveRefused(
                f"The app's broker is {connection.transport.driver_type}, not SQS: there is no"
                " dead-letter queue to redrive. Check the app (-A) and its broker_url."
            )

        def connect() -> Any:
            try:
                return connection.channel()
            except OperationalError as exc:
                return failure_of(exc.__cause__ or exc, Operation.GET_URL)
            except Exception as exc:  # noqa: BLE001  # any exception is a result
                return failure_of(exc, Operation.GET_URL)

        channel = retried(connect)
        if isinstance(channel, Failure):
            raise _error("Cannot connect to SQS", channel)
        yield Broker(channel)


def _certain(
    found: Endpoint, wanted: QueueArn | None, unread: Mapping[str, RedriveUnreachable]
) -> Endpoint:
    """A queue that cannot be read matters only if it could make another one the one of this name.
    The operator has no business with most of the app's queues."""
    for url, error in unread.items():
        if wanted is None and url != found.url:
            raise error
    return found


def _error(what: str, failure: Failure) -> Exception:
    if failure.kind is Kind.NO_QUEUE:
        return RedriveRefused(f"{what}: there is no such queue")
    return unreachable(what, failure)


def _no_such_queue(name: str) -> RedriveRefused:
    return RedriveRefused(
        f"There is no queue {name!r} in the account and Region of the app's broker. Give its name,"
        " URL or ARN."
    )
