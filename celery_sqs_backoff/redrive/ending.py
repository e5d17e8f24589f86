"""How a run ends: its report, its audit line and its last event, in every case."""

from __future__ import annotations

from collections.abc import Sequence

from .audit import audited
from .book import Book
from .errors import RedriveError
from .events import Finished
from .halt import Halt
from .ledger import numbers_of
from .queues import Endpoint
from .report import Ended, RedriveReport
from .settings import Settings
from .source import QueueSource

__all__ = ["finish", "tell_end"]

#: A killed run may hide what it has put aside for 15 minutes; SQS's counts are a minute late.
_LONGEST_HIDDEN_SECONDS = 960


def finish(
    book: Book,
    halt: Halt,
    source: QueueSource,
    settings: Settings,
    destinations: Sequence[Endpoint],
    *,
    messages: int,
    now: float,
) -> RedriveReport:
    """Settle what is left to settle, and tell the end.

    Arguments:
        messages: in the source at the start.
        now: seconds since the epoch.
    """
    if book.error is not None:
        halt.fail(book.error)
    _stop_if_unwritten(book, halt)
    if halt.ended is Ended.DONE and settings.limit is None:
        book.settle_gone(now - _LONGEST_HIDDEN_SECONDS)
    if halt.ended not in (Ended.UNREACHABLE, Ended.FAILED, Ended.ERROR):
        book.end()
        _stop_if_unwritten(book, halt)
    try:
        remaining = source.depth().total
    except RedriveError:  # the report of what was done is worth more than this one number
        remaining = max(0, messages - book.ledger.deleted)
    book.tell_progress(messages, settings.limit)
    return tell_end(
        book,
        source,
        settings,
        destinations,
        remaining=remaining,
        ended=halt.ended,
        detail=halt.detail,
    )


def _stop_if_unwritten(book: Book, halt: Halt) -> None:
    if book.file_error is not None:
        halt(Ended.FAILED, f"cannot write the journal: {book.file_error.strerror}")


def tell_end(
    book: Book,
    source: QueueSource,
    settings: Settings,
    destinations: Sequence[Endpoint],
    *,
    remaining: int,
    ended: Ended,
    detail: str,
) -> RedriveReport:
    """Name what may be sent again; tell the audit line, and the end."""
    book.name_undeleted("SQS has not confirmed the delete")
    with book.lock:
        report = RedriveReport(
            **numbers_of(book.ledger),
            unknown=book.unknown,
            remaining=remaining,
            ended=ended,
            detail=detail,
        )
    book.tell(
        audited(
            settings,
            report,
            source=source.key,
            destinations=[str(queue.arn) for queue in destinations],
            by_task=book.by_task,
            ended=ended.value,
        )
    )
    book.tell(Finished(report, ended.value, detail))
    return report
