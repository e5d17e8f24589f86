"""``celery_sqs_backoff.redrive``: replay a dead-letter queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from .archive import Archive, ArchiveRoute, ArchiveSource
from .broker import Broker, broker_of
from .errors import RedriveRefused
from .events import Event
from .journal import Journal, NoJournal
from .native import move
from .report import RedriveReport
from .route import find_route
from .run import Run
from .settings import Settings
from .source import QueueSource

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["redrive"]

#: How long a message that we have received is hidden before it is renewed or comes back.
_HOLD_SECONDS = 30


def redrive(
    app: Celery,
    source: str | None = None,
    *,
    to: str | None = None,
    load: str | Path | None = None,
    engine: Literal["client", "native"] = "client",
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> RedriveReport:
    """Send the messages of a dead-letter queue back to where they came from, and delete them there.

    A message is deleted when SQS has reported it as sent, and not otherwise, so none is lost. It
    can be sent twice if the answer of SQS is lost or the process is killed between the two; a
    ``journal`` tells which. ``redrive(app, "mail-dlq", rate="10/s")``.

    Arguments:
        app: the Celery app whose broker settings (credentials, Region, endpoint, predefined
            queues) are used.
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: where all messages go. Default: each to the queue it came from, by what SQS or its
            dead-letter record says, else to the one queue that has this dead-letter queue.
        load: send the letters of this archive instead of a queue's.
        engine: ``"native"`` lets SQS do it (StartMessageMoveTask): all messages, at a rate and
            no more.
        on_event: is called with each event, one at a time, from the engine's threads.
        stop: set it to end the run as soon as SQS has answered what is under way.
        rate: messages per second (``"10/s"``, ``"300/m"``, a number). Default: as fast as SQS.
        ramp: seconds or ``"10m"``: from a tenth of the rate up to it. Default: none.
        spread: seconds or ``"15m"``, at most that: each message gets a random delay up to this.
            Not on FIFO queues.
        task, reason, error, older, newer, ids: which messages; see
            :class:`~celery_sqs_backoff.redrive.select.Selection`. The others are left.
        limit: send at most so many.
        max_replays: a message that was replayed so often stays where it is. Default 3.
        canary: send so many first and wait until they have left the destination. Default 0: none.
        canary_timeout: how long to wait. Default 600 s.
        probe: URL, ``"module:callable"`` or callable: whether the provider is well. Asked before
            the first message and every 5 s.
        expired: what to do with tasks whose ``expires`` has passed, which a worker would throw
            away: ``"leave"`` them (default), ``"drop"`` them, or ``"extend"`` their life by as
            long as it was at first, an hour at least.
        in_doubt: ``"resend"`` (default) or ``"hold"`` messages of which nobody knows whether they
            were sent.
        delete: delete the messages instead of sending them. Needs ``dump``.
        dump: append all messages to this file (JSON lines) before they are sent or deleted.
        journal: note in this file what is sent, before and after. A killed run goes on with it.
        force: run although messages will expire first, or the source has a dead-letter queue.
        threads: default 16, fewer under a rate that does not need them.

    Returns:
        The counts, and why it ended.

    Raises:
        RedriveRefused: it must not begin. Nothing was sent.
        RedriveUnreachable: SQS does not answer. (If that happens later, the report says it.)
        ValueError, TypeError: an option is not legal.
    """
    settings = Settings(**options)
    if (source is None) == (load is None):
        raise ValueError("source or load: give one of them")
    with broker_of(app) as broker:
        if engine == "native":
            if source is None:
                raise RedriveRefused("The native engine moves what is in a queue, not an archive.")
            return move(broker, source, to=to, settings=settings, on_event=on_event, stop=stop)
        if engine != "client":
            raise ValueError(f"engine={engine!r} is not legal: it must be client or native")
        with ExitStack() as stack:
            run = _prepare(broker, source, to, load, settings, on_event, stop, stack)
            return run()


def _prepare(
    broker: Broker,
    source: str | None,
    to: str | None,
    load: str | Path | None,
    settings: Settings,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
    stack: ExitStack,
) -> Run:
    retention: int | None = None
    found: ArchiveSource | QueueSource
    route: Any
    if source is None:
        assert load is not None
        if settings.delete or settings.dump:
            raise RedriveRefused("An archive is only sent: delete and dump are for queues.")
        found, route = ArchiveSource(Path(load)), ArchiveRoute(broker, to)
    else:
        route = find_route(broker, source, to=to, force=settings.force)
        found, retention = QueueSource(route.source, hold_seconds=_HOLD_SECONDS), None
        retention = route.queue.retention_seconds
        if settings.spread and found.url.endswith(".fifo"):
            raise RedriveRefused("spread: SQS takes no delay for a message on a FIFO queue.")
    run_id, journal = uuid4().hex[:12], NoJournal()
    if settings.journal is not None:
        journal = stack.enter_context(Journal(settings.journal, source=found.url, run_id=run_id))
        run_id = journal.run_id
    archive = stack.enter_context(Archive(settings.dump)) if settings.dump else None
    return Run(
        found,
        route,
        settings,
        journal=journal,
        archive=archive,
        retention_seconds=retention,
        hold_seconds=_HOLD_SECONDS,
        run_id=run_id,
        on_event=on_event,
        stop=stop,
    )
