"""Decide how a redrive treats a message.

Redrives, dry runs and peeks call the pure function ``triage``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .message import DlqMessage
from .options import RedriveOptions
from .queues import Endpoint


class Action(Enum):
    """How a redrive treats a message."""

    SEND = "send"
    #: Delete the message without sending it (option ``delete``).
    DROP = "drop"
    # Each of the following actions leaves the message in the source.
    SKIP = "skipped"
    FAIL = "failed"
    POISON = "poison"
    HOLD = "in_doubt"
    CAME_BACK = "came back"


@dataclass(frozen=True, slots=True)
class Disposition:
    """How a redrive treats one message, why, and where the message would go."""

    action: Action
    reason: str = ""
    destination: Endpoint | None = None


CAME_BACK = "came back in this run"
EXPIRED = "expired"
NOT_SELECTED = "not selected"
UNKNOWN = "it may have been done already (outcome UNKNOWN)"


def triage(
    message: DlqMessage,
    options: RedriveOptions,
    route: Callable[[DlqMessage], Endpoint | str],
    now: float,
    *,
    run_id: str | None = None,
    is_in_doubt: bool = False,
) -> Disposition:
    """Decide how a redrive treats one message, by the first rule that applies.

    Arguments:
        options: the options of the redrive.
        route: returns a message's destination, or a text that says why it is unknown.
        now: seconds since the epoch.
        run_id: ID of this run; ``None`` = a peek, which sends no message.
        is_in_doubt: whether an earlier send of the message may have succeeded.
    """
    if run_id is not None and message.run_id == run_id:
        return Disposition(Action.CAME_BACK, CAME_BACK)
    if not options.matches(message, now):
        return Disposition(Action.SKIP, NOT_SELECTED)
    if options.delete:
        to = route(message)
        return Disposition(Action.DROP, destination=None if isinstance(to, str) else to)
    if message.unreadable is not None:
        return Disposition(Action.FAIL, f"unreadable: {message.unreadable}")
    if message.replays >= options.max_replays:
        return Disposition(Action.POISON, f"replayed {message.replays} times")
    if is_in_doubt and not options.include_unknown:
        return Disposition(Action.HOLD, "it may have been sent")
    if message.is_expired(now) and options.expired == "leave":
        return Disposition(Action.SKIP, EXPIRED)
    if message.outcome == "UNKNOWN" and not options.include_unknown:
        return Disposition(Action.SKIP, UNKNOWN)
    to = route(message)
    if isinstance(to, str):
        return Disposition(Action.FAIL, to)
    return Disposition(Action.SEND, destination=to)
