"""Find the queue that an operator names, and the queue that a dead letter goes to.

A redrive looks up each queue once and identifies it by the ARN that SQS returns. The operator may
give the destination (``to``). Otherwise the destinations are the queues that SQS lists as sources
of the dead-letter queue. A message only chooses between these queues, because a sender to the
dead-letter queue must not reach other queues through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kombu.exceptions import OperationalError

from ..sqs.arns import QueueArn, is_queue_name, region_of
from ..sqs.calls import Calls, Results
from ..sqs.errors import Failure, Kind, Operation, failure_of
from ..sqs.find_queue import QueueFinder, connection_to_look
from ..sqs.queues import queue_name, read_redrive_policy
from .errors import RedriveError, RedriveRefused, RedriveUnreachable, unreachable
from .halt import TRIES, draw_pause
from .message import DlqMessage
from .options import RedriveOptions

if TYPE_CHECKING:
    from celery import Celery
    from mypy_boto3_sqs import SQSClient

#: A long poll asks all of SQS's servers. A short poll asks only some and can miss messages.
_WAIT_SECONDS = 1

#: A read is not tried again after this time, because an operator waits for it.
_PATIENCE_SECONDS = 15.0

#: Errors that mean that SQS did not respond within the timeouts of the client.
_SILENCE = ("ConnectTimeoutError", "ReadTimeoutError")

T = TypeVar("T")


def try_again(call: Callable[[], T | Failure]) -> T | Failure:
    """Make a call that only reads, and try again after a transient failure.

    There are at most six tries, and no new try after 15 seconds.
    """
    until = monotonic() + _PATIENCE_SECONDS
    for attempt in range(1, TRIES):
        found = call()
        if not isinstance(found, Failure) or not found.is_transient or monotonic() > until:
            return found
        sleep(draw_pause(attempt))
    return call()


@dataclass(frozen=True, eq=False)
class Endpoint:
    """A queue as SQS knows it. Safe for threads.

    Attributes:
        arn: the ARN that SQS returned for the queue.
        calls: makes SQS calls on the queue, with the credentials that workers use. Tries once.
        attributes: the queue's attributes when it was looked up. Empty for a queue that SQS only
            listed as a source.
    """

    arn: QueueArn
    calls: Calls
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.calls.queue_url

    @property
    def name(self) -> str:
        return self.arn.name

    @property
    def is_fifo(self) -> bool:
        return self.arn.is_fifo

    @property
    def dlq_arn(self) -> str | None:
        return read_redrive_policy(self.attributes)[0]

    def depth(self) -> int:
        """Ask SQS for the number of messages, including hidden and delayed messages.

        Raises:
            RedriveRefused: the queue does not exist.
            RedriveUnreachable: SQS does not answer, or denies the call.
        """
        found = try_again(self.calls.attributes)
        if isinstance(found, Failure):
            raise _error(f"Cannot read the attributes of queue {self.name}", found)
        stem, kinds = "ApproximateNumberOfMessages", ("", "NotVisible", "Delayed")
        return sum(int(found.get(stem + kind, 0)) for kind in kinds)

    def depth_or(self, otherwise: int) -> int:
        """Return the depth, or ``otherwise`` if SQS does not return it."""
        try:
            return self.depth()
        except RedriveError:
            return otherwise

    def receive(self, messages: int, hold_seconds: int) -> list[DlqMessage] | Failure:
        """Receive up to ten messages, with all their attributes, and hide them ``hold_seconds``."""
        received = self.calls.receive(
            max_messages=messages,
            wait_seconds=_WAIT_SECONDS,
            visibility_timeout_seconds=hold_seconds,
        )
        return received.failure or [DlqMessage(message) for message in received.messages]

    def hide(self, handles: Sequence[str], seconds: int) -> Results:
        """Hide up to ten messages for ``seconds`` from now. 0 shows them immediately."""
        return self.calls.change_visibility([(handle, seconds) for handle in handles])


@dataclass(frozen=True)
class Route:
    """The dead-letter queue, and the queues that its messages may go to.

    Attributes:
        source: the dead-letter queue.
        sources: the queues that have it as their dead-letter queue.
        fixed: the destination of all messages; ``None`` = the operator gave no ``to``.
    """

    source: Endpoint
    sources: tuple[Endpoint, ...] = ()
    fixed: Endpoint | None = None

    @property
    def retention_seconds(self) -> int | None:
        """Seconds that the dead-letter queue keeps a message. ``None`` = not known."""
        retention = self.source.attributes.get("MessageRetentionPeriod")
        return None if retention is None else int(retention)

    @property
    def default(self) -> Endpoint | None:
        """Destination of a message that names no origin. ``None`` if several are possible."""
        if self.fixed is not None:
            return self.fixed
        return self.sources[0] if len(self.sources) == 1 else None

    def destination(self, message: DlqMessage) -> Endpoint | str:
        """Return the destination of a message, or a text that says why it is unknown.

        The operator's queue (``to``) comes first. Without it, the destination is the source queue
        that SQS moved the message from, or that its record names. A message without either goes to
        the source queue if there is only one.
        """
        if self.fixed is not None:
            return self.fixed
        if (origin := message.origin) is not None:
            for queue in self.sources:
                if origin in (str(queue.arn), queue.url):
                    return queue
            return (
                f"it names {_show(origin)}, which has another dead-letter queue or does not exist:"
                " give a destination (to)"
            )
        if self.default is not None:
            return self.default
        if self.sources:
            names = ", ".join(queue.name for queue in self.sources)
            return f"it may be from any of {names}: give a destination (to)"
        return "no destination is known: give one (to)"


def _show(origin: str) -> str:
    """Return the name in a message's ARN. An invalid ARN can be any text, so do not return it."""
    try:
        return QueueArn.parse(origin).name
    except ValueError:
        return "no queue of this account"


@contextmanager
def open_route(
    app: Celery, source: str, options: RedriveOptions, *, to: str | None
) -> Iterator[tuple[Route, RedriveOptions]]:
    """Connect as the app does, and find the queues that the arguments name.

    Yields the route, and the options with ``origin`` as the queue's name in SQS. For the arguments
    see :func:`celery_sqs_backoff.redrive`.

    Raises:
        RedriveRefused: the queue does not exist, or cannot be redriven.
        RedriveUnreachable: SQS does not answer.
    """
    with connection_to_look(app, to_write=True) as connection:
        if connection.transport.driver_type != "sqs":
            raise RedriveRefused(
                f"The app's broker is {connection.transport.driver_type}, not SQS: there is no"
                " dead-letter queue to redrive. Check the app (-A) and its broker_url."
            )

        def connect() -> Any:
            try:
                return connection.channel()
            except Exception as exc:  # noqa: BLE001  # any exception is a result
                cause = exc.__cause__ if isinstance(exc, OperationalError) else None
                return failure_of(cause or exc, Operation.GET_URL)

        channel = try_again(connect)
        if isinstance(channel, Failure):
            raise _error("Cannot connect to SQS", channel)
        queues = QueueFinder(channel)
        route = find_route(queues, source, to=to, force=options.force)
        if options.spread and route.source.is_fifo:
            raise RedriveRefused("spread: SQS takes no delay for a message on a FIFO queue.")
        if (origin := options.origin) is not None:
            options = replace(options, origin=_origin_in_sqs(queues, origin, route.sources))
        yield route, options


def find_route(queues: QueueFinder, source: str, *, to: str | None, force: bool) -> Route:
    """Find the queues of a redrive.

    Arguments:
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: name, URL or ARN of the destination of all messages; ``None`` = their own queues.
        force: allow a dead-letter queue that has a dead-letter queue itself.

    Raises:
        RedriveRefused: the queue does not exist, or cannot be redriven.
        RedriveUnreachable: SQS does not answer.
    """
    dlq = find_endpoint(queues, source)
    fixed = None if to is None else find_endpoint(queues, to)
    sources = _sources(queues, dlq)
    if not sources and dlq.dlq_arn is not None:  # the operator may name the main queue instead
        dlq = find_endpoint(queues, dlq.dlq_arn)
        sources = _sources(queues, dlq)
    if dlq.dlq_arn is not None and not force:
        raise RedriveRefused(
            f"Queue {dlq.name} has a dead-letter queue itself: each look at a message is a receive,"
            " and after maxReceiveCount receives SQS moves the message there."
            " Remove its redrive policy first, or force it.",
            overridable=True,
        )
    if fixed is not None and fixed.is_fifo != dlq.is_fifo:
        raise RedriveRefused(
            f"{dlq.name} and {fixed.name} are not of the same type: FIFO messages go to a FIFO"
            " queue, others to a standard queue."
        )
    if fixed is not None and fixed.arn == dlq.arn:
        raise RedriveRefused(f"Source and destination are the same queue: {dlq.name}.")
    # SQS requires both to be of one type. A queue that is its own dead-letter queue would loop.
    fit = (q for q in sources if q.arn != dlq.arn and q.is_fifo == dlq.is_fifo)
    return Route(dlq, tuple(fit), fixed)


def _sources(queues: QueueFinder, dlq: Endpoint) -> list[Endpoint]:
    """Return the queues that have ``dlq`` as their dead-letter queue.

    Raises if SQS does not list them, because the redrive cannot know where messages may go. Local
    SQS servers may not support the call. Then read the attributes of all queues of the app.
    """

    def list_them(client: SQSClient) -> list[str]:
        pages = client.get_paginator("list_dead_letter_source_queues").paginate(QueueUrl=dlq.url)
        return list(pages.build_full_result().get("queueUrls") or ())

    found = try_again(partial(dlq.calls.attempt, Operation.LIST_SOURCES, list_them))
    if not isinstance(found, Failure):
        return [_make_source(queues, url, dlq.arn) for url in found]
    if found.kind is not Kind.UNSUPPORTED:
        raise _error(f"Cannot list the queues that have dead-letter queue {dlq.name}", found)
    urls = try_again(queues.urls)
    if isinstance(urls, Failure):
        raise _error("Cannot list the queues", urls)
    read = _read_all(queues, urls).values()
    return [queue for queue in read if queue.dlq_arn == str(dlq.arn)]


def _make_source(queues: QueueFinder, url: str, dlq: QueueArn) -> Endpoint:
    """Return a queue that SQS listed as a source. It is in the account and Region of ``dlq``."""
    arn = dlq.sibling(queue_name(url))
    # A predefined queue may have credentials of its own. Compare the ARN, because a predefined
    # queue of the same name may be in another account or Region.
    predefined = _read_all(queues, _find_predefined(queues, arn.name))
    return predefined.get(arn) or Endpoint(arn, queues.calls(url))


def _origin_in_sqs(queues: QueueFinder, origin: str, sources: Iterable[Endpoint]) -> str:
    """Return the SQS name of a source queue, given by its Celery name, SQS name, URL or ARN."""
    names = {queue.name for queue in sources}
    given = (queue_name(origin), queues.name_in_sqs(origin))
    return next((name for name in given if name in names), origin)


# Find a queue by the text that the operator gave


def find_endpoint(queues: QueueFinder, text: str) -> Endpoint:
    """Find a queue by its name (in Celery or in SQS), URL or ARN.

    Raises:
        RedriveRefused: there is no such queue in the account and Region of the app's broker.
        RedriveUnreachable: SQS does not answer, or denies a call.
    """
    if text.startswith("arn:"):
        try:
            wanted = QueueArn.parse(text)
        except ValueError as exc:
            raise RedriveRefused(f"Invalid queue {text!r}: {exc}") from None
        found = _find_named(queues, wanted.name, text, wanted)
    elif "://" in text:
        url = urlsplit(text)
        *_, account, name = ["", *url.path.strip("/").split("/")]
        found = _find_named(queues, name, text)
        wanted = QueueArn(
            found.arn.partition,
            region_of(url.hostname or "") or found.arn.region,
            account if account.isdigit() else found.arn.account,
            name,
        )
    else:
        return _find_named(queues, text, text)
    if found.arn != wanted:
        raise RedriveRefused(
            f"Queue {text!r} is not in the account and Region of the app's broker: there,"
            f" {found.name} is {found.arn}."
        )
    return found


def _find_named(queues: QueueFinder, name: str, text: str, arn: QueueArn | None = None) -> Endpoint:
    """Find a queue by its name in SQS. If the operator gave only a name, try it in Celery first.

    A dead-letter queue is mostly not in ``predefined_queues``, but its source queues are. Their
    credentials are then used for the dead-letter queue, too.

    Arguments:
        name: name in SQS.
        text: the text that the operator gave.
        arn: the queue to choose if several have this name; ``None`` = refuse then.
    """
    nowhere = RedriveRefused(
        f"There is no queue {text!r} in the account and Region of the app's broker. Give its name,"
        " URL or ARN."
    )
    if not is_queue_name(name):
        raise nowhere
    key = queues.key(name) if name == text else ""
    if key in queues.predefined:
        found = _read_all(queues, [queues.predefined[key]["url"]])
    else:
        found = _read_all(queues, _find_predefined(queues, name))
    unread: RedriveUnreachable | None = None
    if not found:
        found, unread = _find_dlqs_of_predefined(queues, name)
    if not found:
        for candidate in dict.fromkeys((key or name, name)):
            calls = try_again(partial(queues.find_in_sqs, candidate))
            if isinstance(calls, Failure):
                if calls.kind is not Kind.NO_QUEUE:
                    raise _error(f"Cannot look for queue {candidate}", calls)
            elif (queue := _read(calls)) is not None:
                found = {queue.arn: queue}
                break
        else:
            raise unread or nowhere
    if arn in found:
        return found[arn]
    if len(found) > 1:
        raise RedriveRefused(
            f"Queue {text!r} may be any of {', '.join(map(str, found))}: give its ARN."
        )
    return next(iter(found.values()))


def _find_predefined(queues: QueueFinder, name: str) -> list[str]:
    """Return the URLs in ``predefined_queues`` of queues that SQS calls ``name``."""
    urls = (str(queue["url"]) for queue in queues.predefined.values())
    return [url for url in urls if queue_name(url) == name]


def _find_dlqs_of_predefined(
    queues: QueueFinder, name: str
) -> tuple[dict[QueueArn, Endpoint], RedriveUnreachable | None]:
    """Return dead-letter queues called ``name`` that predefined queues have.

    The operator may lack the permission to read some of the predefined queues. Also return the
    first error of this kind, or ``None``.

    Raises:
        RedriveUnreachable: SQS does not respond.
    """
    siblings: dict[QueueArn, Endpoint] = {}
    unread: RedriveUnreachable | None = None
    for predefined in queues.predefined.values():
        calls = queues.calls(predefined["url"])
        try:
            main = _read(calls)
        except RedriveUnreachable as exc:
            if exc.code in _SILENCE:
                raise
            unread = unread or exc
            continue
        if main is not None and queue_name(main.dlq_arn or "") == name:
            dlq = _read(calls.on(f"{calls.queue_url.rpartition('/')[0]}/{name}"))
            if dlq is not None and str(dlq.arn) == main.dlq_arn:
                siblings.setdefault(dlq.arn, dlq)
    return siblings, unread


def _read_all(queues: QueueFinder, urls: Iterable[str]) -> dict[QueueArn, Endpoint]:
    found: dict[QueueArn, Endpoint] = {}
    for url in urls:
        if (queue := _read(queues.calls(url))) is not None:
            found.setdefault(queue.arn, queue)
    return found


def _read(calls: Calls) -> Endpoint | None:
    """Ask SQS for a queue's attributes. Return ``None`` if the queue does not exist."""
    found = try_again(calls.attributes)
    name = queue_name(calls.queue_url)
    if isinstance(found, Failure):
        if found.kind is Kind.NO_QUEUE:
            return None
        raise _error(f"Cannot read the attributes of queue {name}", found)
    try:
        arn = QueueArn.parse(found.get("QueueArn"))
    except ValueError as exc:
        raise RedriveRefused(f"SQS gives queue {name} no ARN: {exc}") from None
    return Endpoint(arn, calls, found)


def _error(what: str, failure: Failure) -> Exception:
    if failure.kind is Kind.NO_QUEUE:
        return RedriveRefused(f"{what}: there is no such queue")
    return unreachable(what, failure)
