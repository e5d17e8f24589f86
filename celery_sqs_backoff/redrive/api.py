"""``celery_sqs_backoff.redrive``: replay a dead-letter queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import RedriveEvent, RedriveReport
from .files import Archive, Journal, NoJournal
from .options import RedriveOptions
from .queues import Endpoint, open_route
from .restore import Restore
from .run import RedriveRun

if TYPE_CHECKING:
    from celery import Celery


def redrive(
    app: Celery,
    source: str,
    *,
    to: str | None = None,
    on_event: Callable[[RedriveEvent], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> RedriveReport:
    """Send the messages of a dead-letter queue back to where they came from, and delete them there.

    A message is deleted when SQS has reported it as sent, and not otherwise, so it is never lost.
    It can be sent twice if the answer of SQS is lost or the process is killed between the two; a
    ``journal`` tells which. ``redrive(app, "mail-dlq", rate="10/s")``.

    Arguments:
        app: the Celery app. Its broker settings (credentials, Region, endpoint, predefined
            queues) are used. Only its account and its Region.
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: where all messages go. Default: each to the queue it came from, as SQS or its
            dead-letter record says, else to the one queue that has this dead-letter queue. Only
            queues that SQS lists as sources of this dead-letter queue are used.
        on_event: is called with each event, one at a time, from a thread of its own. It can
            delay only the end of the run.
        stop: set it to end the run as soon as SQS has answered the calls under way.
        rate: messages per second (``"10/s"``, ``"300/m"``, a number). Default: as fast as SQS.
        ramp: seconds or ``"10m"``: from a tenth of the rate up to it. Default: no ramp.
        spread: seconds or ``"15m"``, at most that: each message gets a random delay up to this.
            Not on FIFO queues.
        task, reason, outcome, origin, error, older, newer, ids: which messages; see
            :class:`~celery_sqs_backoff.redrive.options.RedriveOptions`. Other messages are left.
        include_unknown: send messages that may have been done already, too: their record says so
            (outcome UNKNOWN), or they may have been sent (in doubt). Default: leave them.
        limit: send at most N messages.
        max_replays: skip messages that were already replayed N times. Default 3.
        probe: URL, ``"module:callable"`` or callable: whether the provider is well. Asked before
            the first message and every 5 s.
        expired: a worker would throw away a task after its ``expires``. ``"leave"`` such tasks
            (default), or ``"extend"`` their life by its first length, an hour at least.
        delete: delete the messages instead of sending them, poison and unreadable ones too. Needs
            ``dump``.
        restore: put the messages of this archive back on the dead-letter queue, each once, and send
            no message elsewhere. ``journal`` notes each message put back; by default it is a file
            next to the archive (``FILE.restored``). It takes no selection and no ``limit``.
        dump: append all messages to this file (JSON lines) before they are sent or deleted. It
            must be yours alone, and not a link; so must the journal.
        journal: note each send in this file, before and after. The run after a kill goes on with
            it. A directory: a file in it, named after the queue.
        force: run although the source has a dead-letter queue itself.

    Returns:
        The counts, and why it ended.

    Raises:
        RedriveRefused: it must not begin. No message was sent.
        RedriveUnreachable: SQS does not answer. (If that happens later, the report says it; so
            it does if the journal or the archive cannot be written.)
        ValueError, TypeError: an option is invalid.
    """
    checked = RedriveOptions(**options)
    if checked.restore is not None and to is not None:
        raise ValueError("restore takes no to: it puts messages back on their dead-letter queue")
    with open_route(app, source, checked, to=to) as (route, resolved), ExitStack() as stack:
        key, path, archive = str(route.source.arn), resolved.journal, resolved.restore
        if archive is not None:
            path = path or archive.with_name(f"{archive.name}.restored")
            key = f"restore to {key}"
        elif path is not None:
            path = journal_path(path, route.source)
        journal = NoJournal()
        if path is not None:
            journal = stack.enter_context(Journal(path, source=key))
        settings: dict[str, Any] = {"journal": journal, "on_event": on_event, "stop": stop}
        if archive is not None:
            return Restore(route, resolved, archive=archive, **settings)()
        copy = None
        if resolved.dump is not None:
            copy = stack.enter_context(Archive(resolved.dump, source=str(route.source.arn)))
        return RedriveRun(route, resolved, archive=copy, **settings)()


def journal_path(path: Path, source: Endpoint) -> Path:
    """Return the journal's file. In a directory it is named after the source."""
    return path / f"{source.arn}.journal" if path.is_dir() else path
