"""What a redrive begins with, and a look at one; what cannot be done is refused here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import RedriveRefused
from .options import Options
from .queues import Broker, Endpoint, broker_of
from .route import Route, find_route

if TYPE_CHECKING:
    from celery import Celery


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
