"""What happens during a redrive, as values: the engine prints nothing.

Events are handed to ``on_event`` one at a time, by a thread of their own. They name messages by
their id in the source; they never hold a body or arguments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Ids: TypeAlias = tuple[str, ...]


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
class Sent:
    """SQS has reported these as sent."""

    ids: Ids
    destination: str


@dataclass(frozen=True)
class Deleted:
    ids: Ids


@dataclass(frozen=True)
class Failed:
    """Not sent; they stay in the source."""

    ids: Ids
    reason: str


@dataclass(frozen=True)
class NotDeleted:
    """Sent, and SQS has not confirmed their delete: another run sends again those that are still
    there, unless it has this one's journal."""

    ids: Ids
    reason: str


@dataclass(frozen=True)
class Skipped:
    ids: Ids
    reason: str


@dataclass(frozen=True)
class Poison:
    """Left in the source: they came back in this run, or were replayed too often."""

    ids: Ids
    reason: str


@dataclass(frozen=True)
class InDoubt:
    """Nobody knows whether these were sent; ``resend`` says what is done about it. ``None``:
    nothing; they were sent, so late that another run may have sent them, too."""

    ids: Ids
    resend: bool | None


@dataclass(frozen=True)
class RateChanged:
    """``factor``: of the rate that was asked for, 1 = all of it."""

    factor: float
    reason: str


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

    ``ended`` is the report's, or ``"refused"``; ``report`` is ``None`` if nothing was begun.
    """

    report: Any  # RedriveReport; not imported, so that events depend on nothing
    ended: str = "done"
    detail: str = ""


@dataclass(frozen=True)
class Audit:
    """Who has redriven what, for a log that is kept. It holds no ids and no arguments.

    ``by_task``: messages sent (or dropped), by the name of their task; the hundred most frequent.
    """

    who: str
    source: str
    destinations: tuple[str, ...]
    options: dict[str, Any]
    by_task: dict[str, int]
    sent: int
    deleted: int
    ended: str


Event: TypeAlias = (
    Started
    | Sent
    | Deleted
    | Failed
    | NotDeleted
    | Skipped
    | Poison
    | InDoubt
    | RateChanged
    | Progress
    | Audit
    | Finished
)


def as_dict(event: Event) -> dict[str, Any]:
    """An event as JSON takes it, with its type under ``"event"``."""
    return {"event": type(event).__name__, **asdict(event)}
