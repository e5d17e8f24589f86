"""Celery signals of what happens in a worker: a listener of its events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from ..signals import lease_lost, provider_changed
from .events import (
    Event,
    LeaseLost,
    OfProvider,
    ProviderClosed,
    ProviderOpened,
    ProviderRecovered,
)

__all__ = ["Announce"]

_STATES: Final[dict[type[Event], str]] = {
    ProviderOpened: "open",
    ProviderClosed: "closed",
    ProviderRecovered: "recovered",
}


class Announce:
    """Sends :mod:`celery_sqs_backoff.signals`, each from a thread of its own: a receiver may block.

    Args:
        task_named: returns the task of a name, which is the signal's sender; ``None`` = unknown.
    """

    def __init__(self, task_named: Callable[[str], Any]) -> None:
        self._task_named = task_named

    def __call__(self, event: Event) -> None:
        """Send the event's signal, if it has one."""
        if isinstance(event, LeaseLost):
            _send(
                lease_lost,
                self._task_named(event.task),
                task_id=event.task_id,
                message_id=event.message_id,
                queue=event.queue,
            )
        elif isinstance(event, OfProvider) and (state := _STATES.get(type(event))) is not None:
            _send(provider_changed, event.provider, state=state, tenant=event.tenant)


def _send(signal: Any, sender: object, **facts: str) -> None:
    threading.Thread(
        target=signal.send, args=(sender,), kwargs=facts, name="sqs-signal", daemon=True
    ).start()
