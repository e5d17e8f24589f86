"""Define the public function ``redrive``, which replays a dead-letter queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .events import RedriveEvent, RedriveReport
from .files import Archive, Journal, NoJournal
from .options import RedriveOptions
from .queues import open_route
from .restore import Restore, check_archive
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
    """Move the messages of a dead-letter queue back to the queues that they came from.

    The redrive deletes a message only after SQS has reported it as sent, so no message is lost. A
    message can be sent twice if SQS's answer is lost, or if the process is killed between the send
    and the delete. With a ``journal``, you learn which messages may have been sent twice. Example:
    ``redrive(app, "mail-dlq", rate="10/s")``.

    Arguments:
        app: the Celery app. The redrive connects with the app's broker settings (credentials,
            Region, endpoint, predefined queues). It uses only queues in the account and Region of
            that broker.
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: name, URL or ARN of the queue that gets all messages. Default: each message goes back to
            the queue it came from, if SQS lists this queue as a source of the dead-letter queue.
            If SQS moved the message, SQS names the queue it came from. If a worker moved it, its
            dead-letter record names the queue. If no queue is named and SQS lists only one source,
            the message goes to this source.
        on_event: is called with each event, one at a time. Events up to ``Started`` come in the
            thread that calls ``redrive``. Later events come in another thread. A slow callback
            delays only the start and the end of the run.
        stop: set it to end the run as soon as SQS has answered the calls that are under way.
        rate: messages per second (``"10/s"``, ``"300/m"``, a number). Default: no limit.
        ramp: time in which the rate rises from a tenth to the full rate: seconds, or text such as
            ``"10m"``. Default: no ramp.
        spread: each message gets a random delay up to this time: seconds or text, at most
            ``"15m"``. Default: no delay. Not for FIFO queues.
        task, reason, outcome, origin, error, older, newer, ids: select messages; see
            :class:`~celery_sqs_backoff.redrive.options.RedriveOptions`. Other messages stay in the
            dead-letter queue. Default: all messages.
        include_unknown: also send a message if its task may have been done already (the record has
            outcome UNKNOWN), or if an earlier send of the message may have succeeded (the message
            is *in doubt*). Default: such messages stay in the dead-letter queue.
        limit: send (or delete, with ``delete``) at most this number of messages. Default: no limit.
        max_replays: leave a message in the dead-letter queue if redrives have already sent it this
            number of times. Default 3.
        probe: URL, ``"module:callable"`` or callable that reports whether the provider (the service
            that the tasks call) is healthy. The redrive calls the probe before the first message
            and every 5 s. If the first call fails, no message is sent. Three failures in a row end
            the run.
        expired: how to treat a message if its task is past its ``expires``, so that a worker would
            discard the task. ``"leave"`` (default) leaves the message in the dead-letter queue.
            ``"extend"`` sends it with a later ``expires``: the task gets as much time from now as
            it had after its first send, and at least an hour.
        delete: delete the messages instead of sending them. This includes messages that are
            expired, unreadable, in doubt, or were replayed too often, and messages with outcome
            UNKNOWN. Needs ``dump``.
        restore: an archive (from ``dump``, or from ``copy`` of ``peek``). Put its messages back on
            the dead-letter queue, each once, and send no message elsewhere. Skip messages that are
            already there. ``journal`` records each message put back. Its default is then a file
            next to the archive (``FILE.restored``). Not with ``to``, ``rate``, ``spread``,
            ``probe``, ``delete``, ``dump``, ``limit`` or a selection.
        dump: append each message to this file (JSON lines) before the message is sent or deleted.
        journal: record each send in this file, before the send and after it. After a kill, the next
            run with this file continues the killed run. If the path is a directory, the journal is
            a file in it, named after the dead-letter queue's ARN. Default: no journal. Only you may
            have access to the files of ``journal`` and ``dump``, and they must not be links.
        force: run even if the dead-letter queue has a dead-letter queue itself.

    Returns:
        The counts, and why the run ended.

    Raises:
        RedriveRefused: the redrive must not begin. No message was sent.
        RedriveUnreachable: SQS does not answer at the start, or denies a call. Later failures of
            SQS, and of writes to the journal or the archive, are in the report instead. But a
            restore also raises this error if the restore cannot look through the queue.
        ValueError, TypeError: an option is invalid.

    If ``on_event`` raises an exception, the run ends, and ``redrive`` then raises that exception.
    """
    checked = RedriveOptions(**options)
    if checked.restore is not None and to is not None:
        raise ValueError(
            "restore cannot be used with to: it puts messages back on their dead-letter queue"
        )
    with open_route(app, source, checked, to=to) as route, ExitStack() as stack:
        key, path, archive = str(route.source.arn), checked.journal, checked.restore
        if archive is not None:
            # First check the archive. Otherwise a restore to the wrong queue would leave a journal
            # of that queue next to the archive, and a restore to the right queue would be refused.
            messages = check_archive(archive, key)
            path = path or archive.with_name(f"{archive.name}.restored")
            key = f"restore to {key}"
        elif path is not None and path.is_dir():
            path = path / f"{key}.journal"
        journal = NoJournal()
        if path is not None:
            journal = stack.enter_context(Journal(path, source=key))
        settings: dict[str, Any] = {"journal": journal, "on_event": on_event, "stop": stop}
        if archive is not None:
            return Restore(route, checked, archive=archive, messages=messages, **settings)()
        copy = None
        if checked.dump is not None:
            copy = stack.enter_context(Archive(checked.dump, source=str(route.source.arn)))
        return RedriveRun(route, checked, archive=copy, **settings)()
