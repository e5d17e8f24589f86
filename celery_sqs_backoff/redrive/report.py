"""What came of a redrive, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Ended", "RedriveReport"]


class Ended(str, Enum):
    """Why a redrive ended."""

    DONE = "done"
    GATE = "stopped by the gate"
    INTERRUPTED = "interrupted"
    UNREACHABLE = "SQS is unreachable"


@dataclass(frozen=True)
class RedriveReport:
    """The counts of one run. All count messages.

    Attributes:
        sent: what SQS reported as sent to the destination.
        deleted: what SQS reported as deleted from the source, of those sent (and dropped).
        failed: could not be sent (SQS refused, or no destination is known); still in the source.
        skipped: not selected, or expired and left alone; still in the source.
        poison: came back in this run, or was replayed too often; still in the source.
        in_doubt: may have been sent more than once, or (``hold``) may have been sent and is still
            in the source: the answer to the send was lost. Their ids were in events.
        remaining: in the source at the end, as SQS counts (approximately).
        returned: sent in this run and back in the source. They are in ``poison`` too.
        dropped: deleted from the source without being sent, as was asked.
        not_deleted: sent, and still in the source, because SQS did not delete them: another run
            sends them again, unless it has this one's journal.
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
    ended: Ended = Ended.DONE
    detail: str = ""
