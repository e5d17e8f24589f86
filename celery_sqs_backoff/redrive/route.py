"""From which queue, and back to which?

Where a message goes is decided by SQS's list of the queues that have the dead-letter queue, or by
the operator (``to``). A message only chooses between them: whoever can write to a dead-letter queue
must not reach other queues through it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..sqs.arns import QueueArn
from .errors import RedriveRefused
from .message import DeadLetter
from .options import Options
from .queues import Broker, Endpoint, broker_of

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True)
class Route:
    """The dead-letter queue, and where its messages go.

    Attributes:
        source: the dead-letter queue.
        sources: the queues that have it as their dead-letter queue.
        fixed: the destination of all messages, if one was given.
        retention_seconds: how long the dead-letter queue keeps a message; ``None`` = not known.
    """

    source: Endpoint
    sources: tuple[Endpoint, ...] = ()
    fixed: Endpoint | None = None
    retention_seconds: int | None = None

    @property
    def default(self) -> Endpoint | None:
        """Where a message goes that does not say where it came from."""
        if self.fixed is not None:
            return self.fixed
        return self.sources[0] if len(self.sources) == 1 else None

    def destination(self, message: DeadLetter) -> Endpoint | str:
        """Where a message goes, or why nobody knows.

        In order: the queue that was given (``to``); of the queues with this dead-letter queue, the
        one SQS moved it from, or the one its record names, or the only one.
        """
        if self.fixed is not None:
            return self.fixed
        if (origin := message.origin) is not None:
            for queue in self.sources:
                if origin in (str(queue.arn), queue.url):
                    return queue
            return (
                f"it names {_shown(origin)}, which has another dead-letter queue or is not there:"
                " give a destination (to)"
            )
        if self.default is not None:
            return self.default
        if self.sources:
            names = ", ".join(queue.name for queue in self.sources)
            return f"it may be from any of {names}: give a destination (to)"
        return "no destination is known: give one (to)"


def _shown(origin: str) -> str:
    """The name of a queue as a message gives it: only what can be a name."""
    try:
        return QueueArn.parse(origin).name
    except ValueError:
        return "no queue of this account"


def find_route(broker: Broker, source: str, *, to: str | None, force: bool) -> Route:
    """Resolve the queues of a redrive.

    Arguments:
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: the destination of all messages, likewise.
        force: also from a dead-letter queue that has one itself.

    Raises:
        RedriveRefused: there is no such queue, or it cannot be redriven.
        RedriveUnreachable: SQS does not answer.
    """
    found = broker.find(source)
    attributes = found.found
    fixed = broker.find(to) if to is not None else None
    sources = found.sources()
    if not sources and (arn := _dead_letter_queue(attributes)) is not None:
        found = broker.find(arn)
        attributes = found.found
        sources = found.sources()
    if _dead_letter_queue(attributes) is not None and not force:
        policy = json.loads(attributes["RedrivePolicy"])
        raise RedriveRefused(
            f"Queue {found.name} has a dead-letter queue itself: looking at a message is a receive,"
            f" and after {policy.get('maxReceiveCount')} of them SQS moves it there. Remove its"
            " redrive policy first, or force it.",
            overridable=True,
        )
    if fixed is not None:
        _refuse_unfit(found, fixed)
    retention = attributes.get("MessageRetentionPeriod")
    return Route(
        found,
        tuple(_fit(found, sources)),
        fixed,
        retention_seconds=None if retention is None else int(retention),
    )


def _fit(source: Endpoint, sources: Iterable[Endpoint]) -> Iterable[Endpoint]:
    """SQS itself wants both of one type; a queue that is its own DLQ would be a loop."""
    return (q for q in sources if q.arn != source.arn and q.is_fifo == source.is_fifo)


def _refuse_unfit(source: Endpoint, to: Endpoint) -> None:
    if to.is_fifo != source.is_fifo:
        raise RedriveRefused(
            f"{source.name} and {to.name} are not of the same type: FIFO messages go to a FIFO"
            " queue, others to a standard queue."
        )
    if to.arn == source.arn:
        raise RedriveRefused(f"Source and destination are the same queue: {source.name}.")


def _dead_letter_queue(attributes: Mapping[str, str]) -> str | None:
    found = json.loads(attributes.get("RedrivePolicy") or "{}").get("deadLetterTargetArn")
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Opened:
    """A dead-letter queue, where its messages go, and the options with its names resolved."""

    route: Route
    options: Options


@contextmanager
def opened(app: Celery, source: str, options: Options, *, to: str | None) -> Iterator[Opened]:
    """Connect, and find what the arguments name. They are those of a redrive.

    Raises:
        RedriveRefused: there is no such queue, or it cannot be done.
        RedriveUnreachable: SQS does not answer.
    """
    with broker_of(app) as broker:
        route = find_route(broker, source, to=to, force=options.force)
        if options.spread and route.source.is_fifo:
            raise RedriveRefused("spread: SQS takes no delay for a message on a FIFO queue.")
        if (origin := options.origin) is not None:
            options = replace(options, origin=_sqs_name(broker, origin, route.sources))
        yield Opened(route, options)


def _sqs_name(broker: Broker, origin: str, sources: Sequence[Endpoint]) -> str:
    """The SQS name of a queue that is given as in Celery, or by its URL or ARN."""
    for queue in sources:
        is_url = "://" in origin and origin.split("/")[-2:] == queue.url.split("/")[-2:]
        if is_url or origin == str(queue.arn):
            return queue.name
    listed = {queue.name for queue in sources}
    in_sqs = broker.name_in_sqs(origin)
    return in_sqs if in_sqs in listed else origin
