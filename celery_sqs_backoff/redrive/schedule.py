"""How many threads, how many messages at a time, and was all looked at? Reads the book only."""

from __future__ import annotations

from math import ceil

from ..sqs.limits import MAX_BATCH_ENTRIES, MAX_IN_FLIGHT_MESSAGES
from .book import Book
from .errors import RedriveError
from .pace import Pace
from .settings import Settings
from .source import QueueSource
from .sweep import MAX_THREADS

__all__ = ["most_to_ask", "threads_for", "why_incomplete"]

#: Of a throttled rate, so many seconds' worth is held at a time.
_AHEAD_SECONDS = 5.0

#: Of the quota of messages in flight, what SQS hides at least: it is approximate.
_QUOTA_SHARE = 0.95


def threads_for(settings: Settings, messages: int, *, is_fifo: bool) -> int:
    """FIFO: one, or the order would be lost. Else all that have messages, whatever the rate: how
    many it needs depends on how long SQS takes, which nobody knows before."""
    if is_fifo:
        return 1
    if settings.selection.is_everything and settings.limit:
        messages = min(messages, settings.limit)
    return max(1, min(MAX_THREADS, -(-messages // 10)))


def most_to_ask(book: Book, pace: Pace, settings: Settings, now: float) -> int:
    """How many messages to ask for now: ten, or as many as will be sent within seconds.

    What is held for longer than its time has to be renewed, and is lost if that fails. Of what is
    beyond the ``limit`` nothing is sent, so as many are asked for as bring it about: with a filter
    ten, until one matches.
    """
    most = MAX_BATCH_ENTRIES
    if (limit := settings.limit) is not None:
        with book.lock:
            share = max(book.share(), 0.1)
            most = max(1, min(most, ceil((limit - book.admitted) / share)))
    if (rate := pace.rate_at(now)) is None:
        return most
    with book.lock:
        share = 1.0 if settings.selection.is_everything else min(1.0, book.share())
        waiting = book.ledger.waiting + book.claims * share
    next_at = pace.next_at()
    if next_at is not None and next_at - now > _AHEAD_SECONDS:
        return 0
    room = max(1.0, rate * _AHEAD_SECONDS) - waiting
    return 0 if room < 1 else min(most, int(room / max(share, 0.1)))


def why_incomplete(book: Book, source: QueueSource, messages: int, limit: int | None) -> str | None:
    """Say so if messages are left that could not be received; ``None``: all were looked at."""
    unseen = messages - book.ledger.places
    if unseen <= 0 or (limit is not None and book.admitted >= limit):
        return None
    try:
        others = source.depth().total - book.ledger.hidden
    except RedriveError:
        others = unseen
    if (left := min(unseen, others)) <= 0:
        return None
    if book.ledger.hidden >= _QUOTA_SHARE * MAX_IN_FLIGHT_MESSAGES:
        return (
            f"{left} messages could not be received: SQS hides at most {MAX_IN_FLIGHT_MESSAGES:,}"
            " of a queue at a time, and so many are there that are left. Use a filter that leaves"
            " fewer"
        )
    if source.is_fifo and any(book.ledger.left.values()):
        return (
            f"{left} messages could not be received: on a FIFO queue they wait behind a message of"
            " their group that was left. Settle that one first"
        )
    return (
        f"{left} messages could not be received: somebody else hides them (a peek, another run, a"
        " killed one), or SQS still counts what is gone. Wait some minutes"
    )
