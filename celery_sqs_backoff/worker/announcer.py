"""From what happens to one provider in a worker to events on the worker's stream."""

from __future__ import annotations

from ..observe.events import (
    OfProvider,
    ProviderClosed,
    ProviderOpened,
    ProviderProbing,
    ProviderRecovered,
    ProviderSlowed,
    Recalled,
)
from ..observe.stream import Events
from ..provider.control import Event, Notice

__all__ = ["Announcer"]


class Announcer:
    """Takes the notices of one provider's :class:`~..provider.control.Control`.

    Arguments:
        name: of the provider.
        tenant: what stands for the tenant; empty = there is none.
        events: of the worker.
    """

    def __init__(self, name: str, tenant: str, events: Events) -> None:
        self._name = name
        self._tenant = tenant
        self._events = events
        self._recalled = 0

    def __call__(self, notice: Notice) -> None:
        """Emit the notice's event."""
        self._events.emit(self._event(notice))

    def _event(self, notice: Notice) -> OfProvider:
        name, tenant = self._name, self._tenant
        if notice.event is Event.SLOWED:
            self._recalled = 0
            return ProviderSlowed(provider=name, tenant=tenant)
        if notice.event is Event.OPENED:
            return ProviderOpened(provider=name, tenant=tenant)
        if notice.event is Event.PROBING:
            return ProviderProbing(provider=name, tenant=tenant)
        if notice.event is Event.CLOSED:
            self._recalled = 0
            return ProviderClosed(provider=name, tenant=tenant, waiting=notice.messages)
        if notice.event is Event.RECALLED:
            self._recalled += notice.messages
            return Recalled(provider=name, tenant=tenant, messages=notice.messages)
        return ProviderRecovered(provider=name, tenant=tenant, recalled=self._recalled)
