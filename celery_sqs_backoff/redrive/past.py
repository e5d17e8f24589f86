"""What the log of a redrive says of earlier processes: a fold over its entries. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Entry", "Past"]

#: What a transition writes into the log.
Kind = Literal["sending", "sent", "unsent", "deleted", "gone", "ended"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log. ``at``: seconds since the epoch."""

    kind: Kind
    ids: tuple[str, ...] = ()
    at: float = 0.0


@dataclass
class Past:
    """What the log of earlier processes says: a fold over its entries.

    Attributes:
        run_id: of a run that was killed; ``None`` = the last one has ended.
        in_doubt: message ids with the time (seconds since the epoch) of the first send whose result
            is not known.
        sent: message ids that SQS has, and that are not known to be deleted.
        sent_in_run: messages that the run which was killed has sent.
        last_at: when something was last sent; 0 = never.
        is_resumed: the process that has begun last goes on with a run that was killed.
    """

    run_id: str | None = None
    in_doubt: dict[str, float] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    sent_in_run: int = 0
    last_at: float = 0.0
    is_resumed: bool = False

    @property
    def is_settled(self) -> bool:
        return not self.in_doubt and not self.sent

    def settle(self, gone: Iterable[str], last_at: float, before: float) -> Entry:
        """These were not found. Return what the log is to forget.

        SQS's counts are approximate, and a killed process may hide a message yet. So the log only
        forgets what was sent ``before`` a time; the rest does not count any more, but should it
        turn up in the next run, that one knows it. ``last_at``: when earlier processes last sent.
        """
        certain = []
        for id_ in sorted(gone):
            if self.in_doubt.pop(id_, last_at) < before:
                certain.append(id_)
            self.sent.discard(id_)
        return Entry("gone", tuple(certain))

    def begin(self, run_id: str) -> None:
        """A process begins, or goes on with, this run."""
        self.is_resumed = run_id == self.run_id
        if not self.is_resumed:
            self.run_id, self.sent_in_run = run_id, 0

    def apply(self, entry: Entry) -> None:
        if entry.kind == "ended":
            self.run_id, self.sent_in_run = None, 0
        self.last_at = max(self.last_at, entry.at)
        for id_ in entry.ids:
            if entry.kind == "sending":
                self.in_doubt.setdefault(id_, entry.at)
                continue
            self.in_doubt.pop(id_, None)
            if entry.kind == "sent":
                self.sent_in_run += id_ not in self.sent
                self.sent.add(id_)
            else:
                self.sent.discard(id_)
