"""What came of a redrive, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    @property
    def sentence(self) -> str:
        """The same for people."""
        return {
            Ended.DONE: "done",
            Ended.INCOMPLETE: "not complete",
            Ended.GATE: "stopped by the gate",
            Ended.INTERRUPTED: "interrupted",
            Ended.UNREACHABLE: "SQS is unreachable",
            Ended.FAILED: "stopped by a file that cannot be written",
            Ended.ERROR: "stopped by an unexpected error",
        }[self]


@dataclass(frozen=True)
class RedriveReport:
    """The counts of one run. All count messages.

    Attributes:
        sent: what SQS reported as sent to the destination.
        deleted: what SQS reported as deleted from the source, of those sent (and dropped).
        failed: could not be sent (SQS refused, or no destination is known); still in the source.
        skipped: not selected, or expired and left alone; still in the source.
        poison: came back in this run, or was replayed too often; still in the source.
        in_doubt: may have been sent and is still in the source, or (``include_unknown``) may have
            been sent more than once: the response to the send was lost. Their ids were in events.
            What an earlier run left in doubt and is not in the source any more does not count.
        remaining: in the source at the end, as SQS counts (approximately).
        returned: sent in this run and received again. They are in ``poison`` too.
        dropped: deleted from the source without being sent, as was asked.
        not_deleted: sent, and SQS has not confirmed their delete. Those that are still in the
            source another run sends again, unless it has this one's journal.
        looked_at: distinct messages that were received, and those that came back.
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
        """Messages of a queue that an earlier run had sent: this one only had to delete them."""
        return max(0, self.deleted + self.not_deleted - self.sent - self.dropped)
