"""Events of a redrive while it runs, and its report.

Events are handed to ``on_event`` one at a time, by a thread of their own. They name messages by
their id in the source. They never hold a body or arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeAlias

Ids: TypeAlias = tuple[str, ...]

#: If a signal has interrupted the run: how long it waits for calls under way, and then for a
#: callback that blocks.
LAST_WORDS_SECONDS = 2.0


class Ended(str, Enum):
    """Why a redrive ended. The values are for scripts, and stay."""

    DONE = "done"
    #: Messages are left that this run could not receive.
    INCOMPLETE = "incomplete"
    #: The probe, or messages that came back stopped it.
    GATE = "gate"
    INTERRUPTED = "interrupted"
    #: SQS does not answer, or does not let us.
    UNREACHABLE = "unreachable"
    #: The journal or the archive could not be written.
    FAILED = "failed"
    #: An unexpected exception, such as one of ``on_event``.
    ERROR = "error"


@dataclass(frozen=True)
class RedriveReport:
    """The counts of one run. All count messages.

    Attributes:
        sent: messages that SQS reported as sent to the destination.
        deleted: sent and dropped messages that SQS reported as deleted from the source.
        failed: could not be sent (SQS refused, or no destination is known); still in the source.
        skipped: not selected, or expired and left alone; still in the source.
        poison: came back in this run, or was replayed too often; still in the source.
        in_doubt: may have been sent and is still in the source, or (``include_unknown``) may have
            been sent more than once: the response to the send was lost. Their ids were in events.
            A message that an earlier run left in doubt does not count once it has left the source.
        remaining: in the source at the end, as SQS counts (approximately).
        returned: sent in this run and received again. They are in ``poison`` too.
        dropped: deleted from the source without being sent, as was asked.
        not_deleted: sent, and SQS has not confirmed their delete. Another run sends
            them again if they are still in the source, unless it has this run's journal.
        looked_at: distinct messages that were received, and messages that came back.
        unknown: of those skipped: their record says that they may have been done already.
        ended: why the run ended.
        detail: more about ``ended``, for a person.
    """

    sent: int = 0
    deleted: int = 0
    failed: int = 0
    skipped: int = 0
    poison: int = 0
    in_doubt: int = 0
    remaining: int = 0
    returned: int = 0
    dropped: int = 0
    not_deleted: int = 0
    looked_at: int = 0
    unknown: int = 0
    ended: Ended = Ended.DONE
    detail: str = ""

    @property
    def sent_before(self) -> int:
        """Messages that an earlier run had sent and that this run only had to delete."""
        return max(0, self.deleted + self.not_deleted - self.sent - self.dropped)


@dataclass(frozen=True)
class Started:
    """``messages``: in the source now, which is as many as the run will look at.

    ``journal``: path of the file that a killed run is resumed from, if there is one.
    """

    run_id: str
    source: str
    messages: int
    threads: int
    resumed: bool = False
    journal: str | None = None


@dataclass(frozen=True)
class MessagesSent:
    """SQS has reported these as sent."""

    ids: Ids
    destination: str


@dataclass(frozen=True)
class Deleted:
    ids: Ids


@dataclass(frozen=True)
class _MessagesLeft:
    ids: Ids
    reason: str


class Failed(_MessagesLeft):
    """Not sent; they stay in the source."""


class NotDeleted(_MessagesLeft):
    """Messages that were sent, and SQS has not confirmed their delete.

    Another run sends them again if they are still there, unless it has this run's journal."""


class Skipped(_MessagesLeft):
    """Not selected, or expired and left alone; they stay in the source."""


class Poison(_MessagesLeft):
    """Left in the source: they came back in this run, or were replayed too often."""


@dataclass(frozen=True)
class InDoubt:
    """These may have been sent, and ``resend`` says whether they are sent again. ``None``: they
    were sent, so late that another run may have sent them, too."""

    ids: Ids
    resend: bool | None


@dataclass(frozen=True)
class RunWaits:
    """The run receives no message, and waits, because a killed run may hide the rest.

    ``messages``: the number that it has not seen. ``seconds``: the longest that it waits.
    """

    messages: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """About once a second.

    ``messages``: of the ``looked_at``, as many as there were at the start; ``to_send``: an estimate
    of how many of them will be sent or dropped in all. ``rate``: messages per second, lately.
    """

    looked_at: int
    messages: int
    sent: int
    failed: int
    skipped: int
    poison: int
    returned: int
    to_send: int
    rate: float
    eta_seconds: float | None
    dropped: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of every run, also of one that ends with an exception.

    ``ended`` is the report's, or ``"refused"``; ``report`` is ``None`` if the run was refused.
    """

    report: RedriveReport | None
    ended: str = "done"
    detail: str = ""


RedriveEvent: TypeAlias = (
    Started
    | MessagesSent
    | Deleted
    | Failed
    | NotDeleted
    | Skipped
    | Poison
    | InDoubt
    | RunWaits
    | Progress
    | Finished
)


def as_dict(event: RedriveEvent) -> dict[str, Any]:
    """Return an event as JSON takes it, with its type under ``"event"``."""
    return {"event": type(event).__name__, **asdict(event)}


class Listener:
    """Calls ``on_event`` with one event at a time, in their order. Safe for threads.

    Attributes:
        error: what ``on_event`` raised. It is not called again but for the end.
    """

    def __init__(self, on_event: Callable[[RedriveEvent], None] | None) -> None:
        self._on_event = on_event
        self._queue: SimpleQueue[RedriveEvent | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __call__(self, event: RedriveEvent) -> None:
        """Hand out an event. Never raises. Until the thread is started, wait for the callback."""
        if self._thread is None:
            self._deliver(event)
        else:
            self._queue.put(event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="redrive-events", daemon=True)
        self._thread.start()

    def finish(self, *, is_interrupted: bool = False) -> None:
        """Wait until all events are delivered.

        Arguments:
            is_interrupted: a callback that blocks is not waited for any longer than two seconds.
        """
        if (thread := self._thread) is not None:
            self._queue.put(None)
            thread.join(LAST_WORDS_SECONDS if is_interrupted else None)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)

    def _deliver(self, event: RedriveEvent) -> None:
        if self._on_event is None or (self.error and not isinstance(event, Finished)):
            return
        try:
            self._on_event(event)
        except BaseException as exc:  # noqa: BLE001  # a user's: raised when the run has ended
            self.error = self.error or exc
