"""A message on its way through a simulation."""

from __future__ import annotations

__all__ = ["Message"]


class Message:
    """One message. Times are seconds from the start of the simulation."""

    __slots__ = ("first_received_at", "id", "receives", "runs", "sent_at", "version")

    def __init__(self, number: int, sent_at: float) -> None:
        self.id = str(number)
        self.sent_at = sent_at
        self.first_received_at: float | None = None
        self.receives = 0
        self.runs = 0
        #: Grows with each change of its visibility: an event of an older one is void.
        self.version = 0
