"""What happens during a redrive, as values: the engine prints nothing.

Events are handed to ``on_event`` one at a time, by whichever thread saw them happen. They name
messages by their id in the source; they never hold a body or arguments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

__all__ = [
    "CanaryPassed",
    "CanarySent",
    "Deleted",
    "Event",
    "Failed",
    "Finished",
    "InDoubt",
    "NotDeleted",
    "Poison",
    "Progress",
    "RateChanged",
    "Sent",
    "Skipped",
    "Started",
    "as_dict",
]

Ids: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """``messages``: in the source now, which is as many as the run will look at."""

    run_id: str
    source: str
    messages: int
    threads: int
    resumed: bool = False


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
    """Sent, but SQS did not let us delete them: another run would send them again, unless it has
    this one's journal."""

    ids: Ids
    reason: str


@dataclass(frozen=True)
class Skipped:
    ids: Ids
    reason: str


@dataclass(frozen=True)
class Poison:
    """Left in the source, because they came back in this run or were replayed too often."""

    ids: Ids
    reason: str


@dataclass(frozen=True)
class InDoubt:
    """Nobody knows whether these were sent; ``resend`` says what is done about it."""

    ids: Ids
    resend: bool


@dataclass(frozen=True)
class CanarySent:
    messages: int


@dataclass(frozen=True)
class CanaryPassed:
    messages: int


@dataclass(frozen=True)
class RateChanged:
    """``factor``: of the rate that was asked for, 1 = all of it."""

    factor: float
    reason: str


@dataclass(frozen=True)
class Progress:
    """About once a second. ``rate``: sent per second since the last one."""

    looked_at: int
    messages: int
    sent: int
    failed: int
    skipped: int
    poison: int
    returned: int
    rate: float
    eta_seconds: float | None


@dataclass(frozen=True)
class Finished:
    report: Any  # RedriveReport; not imported, so that events depend on nothing


Event: TypeAlias = (
    Started
    | Sent
    | Deleted
    | Failed
    | NotDeleted
    | Skipped
    | Poison
    | InDoubt
    | CanarySent
    | CanaryPassed
    | RateChanged
    | Progress
    | Finished
)


def as_dict(event: Event) -> dict[str, Any]:
    """An event as JSON takes it, with its type under ``"event"``."""
    return {"event": type(event).__name__, **asdict(event)}
