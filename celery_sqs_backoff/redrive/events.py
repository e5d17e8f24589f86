"""Events of a redrive, and its report.

The redrive calls ``on_event`` with one event at a time. Events name messages by their message ID
in the *source*, which is the dead-letter queue. Events never hold a message body or task arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeAlias

Ids: TypeAlias = tuple[str, ...]

#: After a second Ctrl-C, the run waits this number of seconds for answers of SQS, and then the same
#: number of seconds for ``on_event``, which may block.
GRACE_SECONDS = 2.0


class Ended(str, Enum):
    """Why a redrive ended. Scripts use the values, so do not change a value."""

    DONE = "done"
    #: The run could not receive all messages.
    INCOMPLETE = "incomplete"
    #: The probe failed, or too many sent messages came back to the source.
    GATE = "gate"
    INTERRUPTED = "interrupted"
    #: SQS does not answer, or denies a call.
    UNREACHABLE = "unreachable"
    #: The journal or the archive could not be written.
    FAILED = "failed"
    #: An unexpected exception, for example an exception of ``on_event``.
    ERROR = "error"


@dataclass(frozen=True)
class RedriveReport:
    """The numbers of messages of one run, and why the run ended.

    Attributes:
        sent: messages that SQS reported as sent to the destination.
        deleted: messages that SQS reported as deleted from the source. They are the sent messages,
            the ``dropped`` messages, and messages that an earlier run had sent.
        failed: messages that could not be sent (SQS refused, or no destination is known). They are
            still in the source.
        skipped: messages that were not selected, messages with an expired task, and messages with
            a task that may have been done already. They are still in the source. A restore skips
            the messages that are on the queue.
        poison: messages that came back to the source after this run had sent them, or that were
            replayed too often. They are still in the source.
        in_doubt: messages that may have been sent, because SQS's response to the send was lost.
            Without ``include_unknown`` they are still in the source. With ``include_unknown`` the
            run has sent them again, so they may have been sent twice. The number also counts
            messages that an earlier run left in doubt, and messages that another run may have sent
            at the same time. ``InDoubt`` events name all of them.
        remaining: messages in the source at the end. SQS counts approximately.
        returned: messages that this run has sent and received again. ``poison`` counts them, too.
        dropped: messages that were deleted without being sent (option ``delete``).
        not_deleted: messages that were sent, but SQS has not confirmed their delete. If they are
            still in the source, another run sends them again, unless it uses this run's journal.
        looked_at: messages that were received. A message that came back in this run counts again.
        unknown: the ``skipped`` messages with outcome UNKNOWN in their dead-letter record. Their
            tasks may have been done already.
        ended: why the run ended.
        detail: explanation of ``ended``, for a person. May be empty.
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
        """Number of messages that an earlier run had sent, so that this run only deletes them."""
        return max(0, self.deleted + self.not_deleted - self.sent - self.dropped)


@dataclass(frozen=True)
class Started:
    """The run begins.

    ``messages``: number of messages in the source, or in the archive that is restored. The run
    looks at this number of messages at most. Messages that it has sent and that come back to the
    source do not count towards it. ``resumed``: whether the run continues an earlier run.
    ``journal``: path of the journal, with which another run can continue this run; ``None`` = no
    journal.
    """

    run_id: str
    source: str
    messages: int
    threads: int
    resumed: bool = False
    journal: str | None = None


@dataclass(frozen=True)
class MessagesSent:
    """SQS has reported these messages as sent."""

    ids: Ids
    destination: str


@dataclass(frozen=True)
class Deleted:
    """SQS has reported these messages as deleted from the source."""

    ids: Ids


@dataclass(frozen=True)
class _MessagesLeft:
    ids: Ids
    reason: str


class Failed(_MessagesLeft):
    """Messages that could not be sent. They stay in the source."""


class NotDeleted(_MessagesLeft):
    """Messages that were sent, but SQS has not confirmed their delete from the source."""


class Skipped(_MessagesLeft):
    """Messages that the options exclude, or that a restore found on the queue.

    They stay in the dead-letter queue.
    """


class Poison(_MessagesLeft):
    """Messages that came back after this run had sent them, or that were replayed too often.

    They stay in the source.
    """


@dataclass(frozen=True)
class InDoubt:
    """Messages that may have been sent, or may have been sent twice.

    ``resend``: whether the run sends them again. ``None`` = this run has sent them, but SQS stopped
    hiding them before the run deleted them. So another run may also have sent them.
    """

    ids: Ids
    resend: bool | None


@dataclass(frozen=True)
class RunWaits:
    """The run waits for messages that it cannot receive yet. A killed run may still hide them.

    ``messages``: number of messages that the run has not received. ``seconds``: the run waits at
    most this number of seconds.
    """

    messages: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """The progress of the run, about once a second.

    ``messages``: number of messages in the source at the start. ``looked_at``: how many of them the
    run has received. ``to_send``: estimate of how many of them the run sends or drops in all.
    ``rate``: sent or dropped messages per second, on average since the start. ``eta_seconds``: time
    that the rest takes at this rate; ``None`` = not known.
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
    """The last event of every run, also if the run raises an exception.

    ``ended`` is the value of ``report.ended``. If ``sqs-redrive --json`` ends before its run has
    begun, it prints this event without a report, and ``ended`` is ``"refused"``, for example.
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
    """Return an event as a dict for JSON, with the name of its class as ``"event"``."""
    return {"event": type(event).__name__, **asdict(event)}


class Listener:
    """Calls ``on_event`` with one event at a time, in order. Safe for threads.

    Attributes:
        error: the first exception that ``on_event`` raised; ``None`` = no exception. After an
            exception, ``on_event`` is called only for ``Finished``.
    """

    def __init__(self, on_event: Callable[[RedriveEvent], None] | None) -> None:
        self._on_event = on_event
        self._queue: SimpleQueue[RedriveEvent | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __call__(self, event: RedriveEvent) -> None:
        """Deliver an event. Never raises.

        Before ``start()``, call ``on_event`` in the caller's thread. After ``start()``, a thread of
        the listener calls ``on_event``.
        """
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
            is_interrupted: wait at most two seconds, because ``on_event`` may block.
        """
        if (thread := self._thread) is not None:
            self._queue.put(None)
            thread.join(GRACE_SECONDS if is_interrupted else None)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)

    def _deliver(self, event: RedriveEvent) -> None:
        if self._on_event is None or (self.error and not isinstance(event, Finished)):
            return
        try:
            self._on_event(event)
        except BaseException as exc:  # noqa: BLE001  # the run raises it at its end
            self.error = self.error or exc
