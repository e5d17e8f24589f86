"""What a redrive begins with, and a look at one; what cannot be done is refused here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .archive import ArchiveRoute, ArchiveSource
from .errors import RedriveRefused
from .queues import Broker, Endpoint, broker_of
from .route import Route, find_route
from .settings import Settings
from .source import QueueSource

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["OpenedArchive", "OpenedQueue", "opened"]


@dataclass(frozen=True)
class OpenedQueue:
    """A dead-letter queue, where its messages go, and the options with its names resolved."""

    source: QueueSource
    route: Route
    settings: Settings


@dataclass(frozen=True)
class OpenedArchive:
    """The same for an archive."""

    source: ArchiveSource
    route: ArchiveRoute
    settings: Settings


@contextmanager
def opened(
    app: Celery,
    source: str | None,
    settings: Settings,
    *,
    to: str | None,
    load: str | Path | None,
) -> Iterator[OpenedQueue | OpenedArchive]:
    """Connect, and find what the arguments name. They are those of a redrive.

    Raises:
        RedriveRefused: there is no such queue or archive, or it cannot be done.
        RedriveUnreachable: SQS does not answer.
        ValueError: the arguments do not fit each other.
    """
    if (source is None) == (load is None):
        raise ValueError("expected a dead-letter queue, or an archive to load, and not both")
    with broker_of(app) as broker:
        if source is not None:
            yield _opened_queue(broker, source, settings, to=to)
            return
        assert load is not None
        if settings.delete or settings.dump:
            raise RedriveRefused("An archive is only sent: delete and dump are for queues.")
        archive, to_where = ArchiveSource(Path(load)), ArchiveRoute(broker, to)
        _refuse_spread(settings, to_where.fixed or archive)
        yield OpenedArchive(archive, to_where, settings)


def _opened_queue(
    broker: Broker, source: str, settings: Settings, *, to: str | None
) -> OpenedQueue:
    route = find_route(broker, source, to=to, force=settings.force)
    found = QueueSource(route.source)
    _refuse_spread(settings, found)
    if (origin := settings.selection.origin) is not None:
        settings = settings.with_origin(_sqs_name(broker, origin, route.sources))
    return OpenedQueue(found, route, settings)


def _refuse_spread(settings: Settings, queue: Endpoint | QueueSource | ArchiveSource) -> None:
    if settings.spread and queue.is_fifo:
        raise RedriveRefused("spread: SQS takes no delay for a message on a FIFO queue.")


def _sqs_name(broker: Broker, origin: str, sources: Sequence[Endpoint]) -> str:
    """The SQS name of a queue that is given as in Celery, or by its URL or ARN."""
    for queue in sources:
        is_url = "://" in origin and origin.split("/")[-2:] == queue.url.split("/")[-2:]
        if is_url or origin == str(queue.arn):
            return queue.name
    listed = {queue.name for queue in sources}
    in_sqs = broker.name_in_sqs(origin)
    return in_sqs if in_sqs in listed else origin
