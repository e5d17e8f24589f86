"""``celery_sqs_backoff.redrive``: replay a dead-letter queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .events import RedriveEvent, RedriveReport
from .files import Archive, Journal, NoJournal
from .options import RedriveOptions
from .queues import open_route
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
    """Send the messages of a dead-letter queue back to their queues, and delete them from it.

    The redrive deletes a message only after SQS has reported it as sent, so no message is lost. A
    message can be sent twice if SQS's answer is lost, or if the process is killed between the send
    and the delete. A ``journal`` records which messages these are. Example:
    ``redrive(app, "mail-dlq", rate="10/s")``.

    Arguments:
        app: the Celery app. The redrive uses its broker settings (credentials, Region, endpoint,
            predefined queues), and only queues in the account and Region of its broker.
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: where all messages go. Default: each to the queue it came from, as SQS or its
            dead-letter record says, else to the one queue that has this dead-letter queue. Only
            queues that SQS lists as sources of this dead-letter queue are used.
        on_event: is called with each event, one at a time, in a thread of its own. A slow callback
            delays only the end of the run.
        stop: set it to end the run as soon as SQS has answered the calls under way.
        rate: messages per second (``"10/s"``, ``"300/m"``, a number). Default: no limit.
        ramp: seconds or text such as ``"10m"``, in which the rate rises from a tenth to all of it.
            Default: no ramp.
        spread: seconds or text, at most ``"15m"``. Each message gets a random delay up to this.
            Default: no delay. Not for FIFO queues.
        task, reason, outcome, origin, error, older, newer, ids: select messages; see
            :class:`~celery_sqs_backoff.redrive.options.RedriveOptions`. Other messages stay.
            Default: all messages.
        include_unknown: also send a message if its task may have been done already (its record has
            outcome UNKNOWN), or if it may have been sent before (in doubt). Default: leave such
            messages.
        limit: send at most this number of messages. Default: no limit.
        max_replays: skip messages that were already replayed this number of times. Default 3.
        probe: URL, ``"module:callable"`` or callable that reports whether the provider is healthy.
            The redrive calls it before the first message and every 5 s.
        expired: how to treat a task after its ``expires``, which a worker would discard.
            ``"leave"`` it (default), or ``"extend"`` its ``expires``: the task gets the same
            lifetime as at its first send, counted from now, at least an hour.
        delete: delete the messages instead of sending them, also poison and unreadable ones. Needs
            ``dump``.
        restore: put the messages of this archive back on the dead-letter queue, each once, and send
            no message elsewhere. ``journal`` records each message put back; by default it is a file
            next to the archive (``FILE.restored``). It takes no selection and no ``limit``.
        dump: append each message to this file (JSON lines) before it is sent or deleted. Only you
            may have access to the file, and it must not be a link.
        journal: record each send in this file, before and after. After a kill, the next run with
            this file continues it. Only you may have access to the file, and it must not be a link.
            In a directory, the journal is a file named after the queue. Default: no journal.
        force: run although the dead-letter queue has a dead-letter queue itself.

    Returns:
        The counts, and why the run ended.

    Raises:
        RedriveRefused: the redrive must not begin. No message was sent.
        RedriveUnreachable: SQS does not answer at the start. Later failures of SQS, and of writes
            to the journal or the archive, are in the report instead.
        ValueError, TypeError: an option is invalid.
    """
    checked = RedriveOptions(**options)
    if checked.restore is not None and to is not None:
        raise ValueError("restore takes no to: it puts messages back on their dead-letter queue")
    with open_route(app, source, checked, to=to) as route, ExitStack() as stack:
        key, path, archive = str(route.source.arn), checked.journal, checked.restore
        if archive is not None:
            path = path or archive.with_name(f"{archive.name}.restored")
            key = f"restore to {key}"
        elif path is not None and path.is_dir():
            path = path / f"{key}.journal"
        journal = NoJournal()
        if path is not None:
            journal = stack.enter_context(Journal(path, source=key))
        settings: dict[str, Any] = {"journal": journal, "on_event": on_event, "stop": stop}
        if archive is not None:
            return Restore(route, checked, archive=archive, **settings)()
        copy = None
        if checked.dump is not None:
            copy = stack.enter_context(Archive(checked.dump, source=str(route.source.arn)))
        return RedriveRun(route, checked, archive=copy, **settings)()
