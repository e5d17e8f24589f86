"""A few messages go first: have they left the main queue, or come back?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..units import spell_duration
from .book import Book
from .errors import RedriveError
from .events import CanaryPassed, CanarySent
from .halt import Halt
from .queues import Endpoint
from .report import Ended
from .source import Source

__all__ = ["Canary"]

_LOST_SHARE = 0.05
_POLL_SECONDS = 1.0

#: So late SQS's counts can be.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_GetQueueAttributes.html
_COUNTED_SECONDS = 60.0


class Canary:
    """The first few messages of a run. Make one, send them between the two calls.

    Arguments:
        book, halt, source: of the run.
        timeout: seconds.
        clock: seconds; goes on while the machine sleeps.
    """

    def __init__(
        self, book: Book, halt: Halt, source: Source, *, timeout: float, clock: Callable[[], float]
    ) -> None:
        self._book, self._halt, self._source = book, halt, source
        self._timeout, self._clock = timeout, clock
        self._usual_depth: dict[str, int] = {}

    def note_usual_depth(self, main: Endpoint) -> None:
        """How many messages are in a main queue before the canary."""
        self._usual_depth[main.url] = main.depth().total

    def watch(self, destinations: Sequence[Endpoint], *, messages: int) -> None:
        """Wait until it has left the main queue; end the run if it does not, or comes back.

        Before SQS has counted it, it has neither left nor come back.

        Arguments:
            messages: in the source at the start.
        """
        book, halt, clock = self._book, self._halt, self._clock
        sent = book.ledger.sent
        if halt.is_set or not sent:
            return
        book.tell(CanarySent(sent))
        deadline = clock() + self._timeout
        counted_at = clock() + min(_COUNTED_SECONDS, self._timeout)
        while (left := counted_at - clock()) > 0:
            if halt.wait(min(left, _POLL_SECONDS)):
                return
        quiet = 0
        while quiet < 2:  # twice: SQS's counts are approximate
            if halt.wait(_POLL_SECONDS):
                return
            try:
                back = self._source.depth().total - (messages - book.ledger.deleted)
                gone = all(q.depth().total <= self._usual_depth[q.url] for q in destinations)
            except RedriveError:  # it was tried several times; the deadline ends it
                back, gone = 0, False
            if back > _LOST_SHARE * sent:
                book.back = back
                halt(Ended.GATE, f"{back} of the {sent} canary messages came back, as SQS counts")
                return
            quiet = quiet + 1 if gone else 0
            if not quiet and clock() >= deadline:
                waited = spell_duration(self._timeout)
                halt(Ended.GATE, f"the canary has not left the main queue within {waited}")
                return
        book.tell(CanaryPassed(sent))
