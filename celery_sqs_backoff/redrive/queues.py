"""Find the queue that an operator names, and the queue that a dead letter goes to.

A redrive looks up each queue once and identifies it by the ARN that SQS returns. The operator may
give one destination for all messages (``to``). Otherwise a message goes to the queue it came from.
SQS must list this queue as a source of the dead-letter queue, because a forged message could name
any queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ..sqs.arns import QueueArn, is_queue_name, region_of
from ..sqs.calls import Calls, Results
from ..sqs.errors import Failure, Kind, Operation, failure_of
from ..sqs.find_queue import QueueFinder, connection_to_look
from ..sqs.queues import count_messages, queue_name, read_redrive_policy, sibling_url
from .errors import RedriveError, RedriveRefused, RedriveUnreachable, make_unreachable
from .halt import TRIES, draw_pause
from .message import DlqMessage
from .options import RedriveOptions

if TYPE_CHECKING:
    from celery import Celery
    from mypy_boto3_sqs import SQSClient

#: Seconds that a receive waits for messages, which makes it a long poll. A long poll asks all of
#: SQS's servers. A short poll asks only some and can miss messages.
_WAIT_SECONDS = 1

#: After this time a call that only reads is not tried again, because an operator waits for it.
_PATIENCE_SECONDS = 15.0

#: Errors that mean that SQS did not respond within the timeouts of the client.
_SILENCE = ("ConnectTimeoutError", "ReadTimeoutError")

T = TypeVar("T")


def ask(what: str, call: Callable[[], T | Failure]) -> T:
    """Make a call that only reads, try again after a transient failure, and return its result.

    There are at most six tries, and no new try after 15 seconds.

    Arguments:
        what: names the call in an error, such as ``"Cannot list the queues"``.

    Raises:
        RedriveRefused: the queue does not exist.
        RedriveUnreachable: SQS does not answer, or denies the call.
    """
    until, attempt = monotonic() + _PATIENCE_SECONDS, 1
    while isinstance(found := call(), Failure):
        if found.kind is Kind.NO_QUEUE:
            raise RedriveRefused(f"{what}: there is no such queue")
        if attempt == TRIES or not found.is_transient or monotonic() > until:
            raise make_unreachable(what, found)
        sleep(draw_pause(attempt))
        attempt += 1
    return found


@dataclass(frozen=True, eq=False)
class Endpoint:
    """A queue on SQS, and the calls on it. Safe for threads.

    Attributes:
        arn: the ARN that SQS returned for the queue.
        calls: makes SQS calls on the queue, with the credentials that workers use. It tries each
            call once.
        attributes: the queue's attributes when the redrive looked it up. Empty if the redrive knows
            the queue only from SQS's list of sources.
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
        found = ask(f"Cannot read the attributes of queue {self.name}", self.calls.attributes)
        return sum(count_messages(found))

    def depth_or(self, otherwise: int) -> int:
        """Return ``depth()``, or ``otherwise`` if SQS does not return the number."""
        try:
            return self.depth()
        except RedriveError:
            return otherwise

    def receive(self, messages: int, hold_seconds: int) -> list[DlqMessage] | Failure:
        """Receive up to ten messages with all attributes, and hide them for ``hold_seconds``."""
        received = self.calls.receive(
            max_messages=messages,
            wait_seconds=_WAIT_SECONDS,
            visibility_timeout_seconds=hold_seconds,
        )
        return received.failure or [DlqMessage(message) for message in received.messages]

    def hide(self, handles: Sequence[str], seconds: int) -> Results:
        """Hide up to ten messages for ``seconds`` from now. With 0, SQS shows them immediately."""
        return self.calls.change_visibility([(handle, seconds) for handle in handles])


@dataclass(frozen=True)
class Route:
    """The dead-letter queue, and the queues that its messages may go to.

    Attributes:
        source: the dead-letter queue, which is the source of the redrive.
        sources: the queues that have ``source`` as their dead-letter queue.
        fixed: the destination of all messages (``to``); ``None`` = the operator gave no queue.
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
        """Destination of a message that does not name the queue it came from.

        ``None`` = not known, because the dead-letter queue has several sources, or no source.
        """
        if self.fixed is not None:
            return self.fixed
        return self.sources[0] if len(self.sources) == 1 else None

    def destination(self, message: DlqMessage) -> Endpoint | str:
        """Return the destination of a message, or a text that says why it is unknown.

        If the operator gave a queue (``to``), it is the destination. Otherwise the destination is
        the queue that SQS moved the message from, or else that the dead-letter record names. This
        queue must be in ``sources``. A message that names no queue goes to the only queue in
        ``sources``. If ``sources`` has several queues, or none, its destination is unknown.
        """
        if self.fixed is not None:
            return self.fixed
        if (origin := message.origin) is not None:
            for queue in self.sources:
                if origin in (str(queue.arn), queue.url):
                    return queue
            return (
                f"it comes from {_show(origin)}, which does not use this dead-letter queue:"
                " give a destination (to)"
            )
        if self.default is not None:
            return self.default
        if self.sources:
            names = ", ".join(queue.name for queue in self.sources)
            return f"it may be from any of {names}: give a destination (to)"
        return "no destination is known: give one (to)"


def _show(origin: str) -> str:
    """Return the name of the queue that a message came from, by the ARN in the message.

    If the ARN is invalid, return a constant text, because a sender could have written anything.
    """
    try:
        return QueueArn.parse(origin).name
    except ValueError:
        return "an unknown queue"


@contextmanager
def open_route(
    app: Celery, source: str, options: RedriveOptions, *, to: str | None
) -> Iterator[Route]:
    """Connect with the app's broker settings, and yield the queues of a redrive.

    For the arguments see :func:`celery_sqs_backoff.redrive`.

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
                return failure_of(exc.__cause__ or exc, Operation.GET_URL)

        queues = QueueFinder(ask("Cannot connect to SQS", connect))
        route = find_route(queues, source, to=to, force=options.force)
        if options.spread and route.source.is_fifo:
            raise RedriveRefused("spread: SQS takes no delay for a message on a FIFO queue.")
        yield route


def find_route(queues: QueueFinder, source: str, *, to: str | None, force: bool) -> Route:
    """Find the queues of a redrive.

    For the arguments see :func:`celery_sqs_backoff.redrive`.

    Raises:
        RedriveRefused: the queue does not exist, or cannot be redriven.
        RedriveUnreachable: SQS does not answer.
    """
    dlq = find_endpoint(queues, source)
    fixed = None if to is None else find_endpoint(queues, to)
    sources = _find_sources(queues, dlq)
    if not sources and dlq.dlq_arn is not None:  # the operator may name the main queue instead
        dlq = find_endpoint(queues, dlq.dlq_arn)
        sources = _find_sources(queues, dlq)
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
    # Leave out the dead-letter queue if it is its own source, because it would get its messages
    # back. Leave out a FIFO source of a standard queue and the reverse, because SQS requires a
    # queue and its dead-letter queue to be of the same type.
    fit = (q for q in sources if q.arn != dlq.arn and q.is_fifo == dlq.is_fifo)
    return Route(dlq, tuple(fit), fixed)


def _find_sources(queues: QueueFinder, dlq: Endpoint) -> list[Endpoint]:
    """Return the queues that have ``dlq`` as their dead-letter queue.

    Raise if SQS refuses the call or does not answer, because then the redrive cannot know where
    messages may go. If a local SQS server does not have the call, the function reads the attributes
    of the queues in ``predefined_queues``, or of all queues if this setting is empty.
    """

    def list_them(client: SQSClient) -> list[str]:
        pages = client.get_paginator("list_dead_letter_source_queues").paginate(QueueUrl=dlq.url)
        return list(pages.build_full_result().get("queueUrls") or ())

    def list_if_supported() -> list[str] | Failure | None:
        found = dlq.calls.attempt(Operation.LIST_SOURCES, list_them)
        is_unsupported = isinstance(found, Failure) and found.kind is Kind.UNSUPPORTED
        return None if is_unsupported else found

    found = ask(f"Cannot list the queues that have dead-letter queue {dlq.name}", list_if_supported)
    if found is not None:
        return [_make_source(queues, url, dlq.arn) for url in found]
    read = _read_all(map(queues.calls, ask("Cannot list the queues", queues.urls)))
    return [queue for queue in read.values() if queue.dlq_arn == str(dlq.arn)]


def _make_source(queues: QueueFinder, url: str, dlq: QueueArn) -> Endpoint:
    """Return a queue that SQS listed as a source of ``dlq``.

    SQS lists only queues in the account and Region of ``dlq``, so only the name differs.
    """
    arn = dlq.sibling(queue_name(url))
    # A predefined queue may have credentials of its own, so prefer its ``Calls``. Compare the ARN,
    # because a predefined queue of the same name may be in another account or Region.
    predefined = _read_all(_find_predefined(queues, arn.name))
    return predefined.get(arn) or Endpoint(arn, queues.calls(url))


# Find a queue by the text that the operator gave


def find_endpoint(queues: QueueFinder, text: str) -> Endpoint:
    """Find a queue by its name (in Celery or in SQS), URL or ARN.

    Raises:
        RedriveRefused: there is no such queue in the account and Region of the app's broker.
        RedriveUnreachable: SQS does not answer, or denies a call.
    """
    is_name = not text.startswith("arn:") and "://" not in text
    name = text if is_name else queue_name(text.rstrip("/"))
    found = _find_named(queues, name, in_celery=is_name) if is_queue_name(name) else {}
    if not found:
        raise RedriveRefused(
            f"There is no queue {text!r} in the account and Region of the app's broker. Give its"
            " name, URL or ARN."
        )
    meant = [queue for queue in found.values() if is_name or _is_at(text, queue.arn)]
    if len(meant) > 1:
        raise RedriveRefused(
            f"Queue {text!r} may be any of {', '.join(map(str, found))}: give its ARN."
        )
    if not meant:
        raise RedriveRefused(
            f"Queue {text!r} is not in the account and Region of the app's broker: there,"
            f" {name} is {', '.join(map(str, found))}."
        )
    return meant[0]


def _is_at(text: str, arn: QueueArn) -> bool:
    """Return whether an ARN or URL may mean the queue ``arn``. The caller has compared the names.

    An ARN must be equal. The account and Region of a URL must match, if the URL has them.
    """
    if text.startswith("arn:"):
        return text == str(arn)
    url = urlsplit(text)
    account = url.path.strip("/").rpartition("/")[0]
    region = region_of(url.hostname or "")
    return region in (None, arn.region) and (not account.isdigit() or account == arn.account)


def _find_named(queues: QueueFinder, name: str, *, in_celery: bool) -> Mapping[QueueArn, Endpoint]:
    """Find queues by name. Return them in a dict whose keys are their ARNs.

    A dead-letter queue is often missing in ``predefined_queues``, although the queues that use it
    are there. In this case, call it with the credentials of one of these queues.

    Arguments:
        in_celery: ``True`` = first look for a queue with this name in Celery, and then for a queue
            with this name in SQS. ``False`` = look only for a queue with this name in SQS.
    """
    key = queues.key(name) if in_celery else name
    if in_celery and key in queues.predefined:
        return _read_all([queues.calls(queues.predefined[key]["url"])])
    found = _read_all(_find_predefined(queues, name))
    found = found or _read_all(_find_dlqs_of_predefined(queues, name))
    for candidate in dict.fromkeys((key, name)):
        if found:
            break
        with suppress(RedriveRefused):  # there is no queue of this name
            find = partial(queues.find_in_sqs, candidate)
            found = _read_all([ask(f"Cannot look for queue {candidate}", find)])
    return found


def _find_predefined(queues: QueueFinder, name: str) -> list[Calls]:
    """Return ``Calls`` for each queue in ``predefined_queues`` with this name in SQS."""
    urls = (str(queue["url"]) for queue in queues.predefined.values())
    return [queues.calls(url) for url in urls if queue_name(url) == name]


def _find_dlqs_of_predefined(queues: QueueFinder, name: str) -> Iterator[Calls]:
    """Yield ``Calls`` for each dead-letter queue with this name in SQS.

    To find them, read the redrive policies of the queues in ``predefined_queues``.

    Raises:
        RedriveUnreachable: SQS does not respond.
    """
    for predefined in queues.predefined.values():
        calls = queues.calls(predefined["url"])
        try:
            main = _read(calls)
        except RedriveUnreachable as exc:  # the operator may have no permission to read this queue
            if exc.code in _SILENCE:
                raise
            continue
        if main is not None and main.dlq_arn is not None and queue_name(main.dlq_arn) == name:
            yield calls.on(sibling_url(main.url, main.dlq_arn))


def _read_all(calls: Iterable[Calls]) -> dict[QueueArn, Endpoint]:
    return {queue.arn: queue for each in calls if (queue := _read(each)) is not None}


def _read(calls: Calls) -> Endpoint | None:
    """Ask SQS for a queue's attributes. Return ``None`` if the queue does not exist."""
    what = f"Cannot read the attributes of queue {queue_name(calls.queue_url)}"
    try:
        found = ask(what, calls.attributes)
    except RedriveRefused:
        return None
    return Endpoint(QueueArn.parse(found.get("QueueArn")), calls, found)
