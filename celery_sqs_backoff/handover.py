"""What the process that ran a task tells the worker's main process, which holds the message.

Of what happens in the one, only the task's outcome as Celery pickles it reaches the other. So a
delay travels as a subclass of Celery's ``Retry``, and the reason for giving up as an attribute of
Celery's ``ExceptionInfo``: the exception itself may be replaced on the way, if it does not pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry

from .budget import GiveUpReason
from .delivery import Delivery
from .outcomes import Outcome

__all__ = ["DELIVERY_KEY", "BackoffRetry", "GiveUp", "delivery_of", "give_up_of", "note_give_up"]

#: Where the main process puts the :class:`Delivery`: beside kombu's own facts about the message.
#: Anywhere else Celery would take it for a custom header and copy it to the tasks this one sends.
DELIVERY_KEY = "sqs_delivery"


class BackoffRetry(Retry):  # type: ignore[misc]  # Celery is not typed
    """Ask the worker to hide the message for ``when`` seconds. Nothing has been published.

    It has no fields of its own: ``Retry.__reduce__`` would drop them on the way.
    """


@dataclass(frozen=True)
class GiveUp:
    """Why a failed message is not retried, and what failed."""

    reason: GiveUpReason
    outcome: Outcome
    exception_type: str | None = None
    exception_message: str | None = None

    @classmethod
    def because_of(cls, exc: BaseException, reason: GiveUpReason, outcome: Outcome) -> GiveUp:
        """Describe the exception while it is still what the task has raised."""
        return cls(reason, outcome, f"{type(exc).__module__}.{type(exc).__qualname__}", _text(exc))


def delivery_of(request: Any) -> Delivery | None:
    """Return the SQS message behind a task request, or ``None`` on another broker."""
    properties = request.properties or {}
    delivery = (properties.get("delivery_info") or {}).get(DELIVERY_KEY)
    return delivery if isinstance(delivery, Delivery) else None


def note_give_up(exc_info: Any, give_up: GiveUp) -> None:
    """Let the reason travel with Celery's ``ExceptionInfo``."""
    exc_info.sqs_give_up = give_up


def give_up_of(exc_info: Any) -> GiveUp | None:
    """Read the reason, or ``None`` if the failure did not pass through the task."""
    return getattr(exc_info, "sqs_give_up", None)


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # noqa: BLE001
        # A user's __str__: it must not keep the message from its dead-letter queue.
        return f"<unprintable: {type(broken).__name__}>"
