"""Publish in the store the numbers that only workers know. ``sqs-status`` reads them.

Each worker has one small record. The record expires a minute after its last write, so that a worker
that has ended is not counted for long. The record contains names of queues and providers, and
numbers, but no content of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ..store.errors import RecordRejected
from ..store.protocol import KEEP_SECONDS
from ..store.records import Record, Records

#: Seconds after which a record expires. A running worker writes its record every ten seconds.
TTL_SECONDS: Final = 60.0

#: Largest number of providers in a record. Each tenant of a provider counts as a provider. If there
#: are more, the record keeps the paused providers first.
_MOST_PROVIDERS: Final = 100

#: States of a provider, the worst first.
_WORST_FIRST: Final = ("paused", "recovering", "ok")

#: Kind of the records, and name of the record that lists the workers.
_KIND: Final = "status"
_LIST: Final = "workers"


def find_first(times: Iterable[float | None]) -> float | None:
    """Return the earliest time, and skip each ``None``. Return ``None`` if there is no time."""
    return min((at for at in times if at is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class QueueNow:
    """Numbers of one worker for one queue. Times are seconds since the epoch.

    Attributes:
        running: number of tasks that the worker's pool is running, with the base class or without.
        held: number of messages that the worker has received but not started.
        waiting: number of messages that the worker has hidden and that are not due yet.
        oldest_sent_at: when the oldest running, held or waiting message was sent; ``None`` = not
            known.
        oldest_due_at: the earliest start of a wait. The wait of a message starts when the message
            is sent, or at its ETA if the ETA is later; ``None`` = no message is waiting, or not
            known.
        next_gives_up_at: the earliest time at which ``retry_for`` of a waiting message is over;
            ``None`` = never.
        dead_letters: number of messages given up since the worker started, for each reason.
    """

    running: int = 0
    held: int = 0
    waiting: int = 0
    oldest_sent_at: float | None = None
    oldest_due_at: float | None = None
    next_gives_up_at: float | None = None
    dead_letters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProviderNow:
    """State of one provider, or of one tenant of it, in one worker.

    Attributes:
        provider: name of the provider.
        tenant: a digest of the tenant; empty = no tenant.
        state: ``"paused"``, ``"recovering"`` or ``"ok"``.
        hidden: number of messages that the worker has hidden, and that it can make visible early.
        in_line: number of messages that wait in the worker, because the provider's rate or its
            recovery limits the calls.
        rate: calls a second that the worker may make while the provider recovers; 0 = no limit.
    """

    provider: str
    tenant: str = ""
    state: str
    hidden: int = 0
    in_line: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Name of the provider, with the tenant in brackets if there is one."""
        return f"{self.provider}[{self.tenant}]" if self.tenant else self.provider

    @property
    def sort_key(self) -> tuple[int, int]:
        """Sort key that puts paused providers first, then recovering ones, then the others.

        Within a state, the provider with the most waiting messages comes first. A state that only
        another version of this package knows comes last.
        """
        return [*_WORST_FIRST, self.state].index(self.state), -self.hidden - self.in_line


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """The record of one worker, as ``sqs-status`` reads it."""

    queues: Mapping[str, QueueNow] = field(default_factory=dict)
    providers: tuple[ProviderNow, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        """Return the record for the store, with at most 100 providers, the worst ones first."""
        providers = sorted(self.providers, key=lambda one: one.sort_key)[:_MOST_PROVIDERS]
        return asdict(replace(self, providers=tuple(providers)))

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> WorkerNow:
        """Read a record. Skip fields that only another version of this package knows.

        Raises:
            AttributeError, KeyError, TypeError: the fields do not form a worker's record.
        """
        return cls(
            queues={name: _read(QueueNow, one) for name, one in found["queues"].items()},
            providers=tuple(_read(ProviderNow, one) for one in found["providers"]),
        )


def _read(kind: Any, found: Mapping[str, Any]) -> Any:
    return kind(**{name: v for name, v in found.items() if name in kind.__dataclass_fields__})


class Board:
    """The records of all workers of a project.

    Args:
        records: the project's records. Every method raises their errors.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def write(self, worker: str, now: WorkerNow) -> None:
        """Publish a worker's record. This usually takes three calls to the store.

        Args:
            worker: name of the worker.
            now: the worker's numbers.
        """
        fields = now.as_fields()
        self._records.update(_KIND, _name(worker), fields, TTL_SECONDS, lambda _: fields)
        if worker not in self._workers():
            self._join(worker)

    def leave(self, worker: str) -> None:
        """Delete a worker's record, because the worker ends.

        If a new worker already uses the same name, this deletes the record of the new worker, which
        writes it again within ten seconds.
        """
        self._records.discard(self._records.key(_KIND, _name(worker)))

    def read(self) -> dict[str, WorkerNow]:
        """Return the readable records that have not expired, by name of the worker."""
        found = {}
        for worker in self._workers():
            if (there := self._record_of(worker)) is not None:
                with suppress(AttributeError, KeyError, TypeError):
                    found[worker] = WorkerNow.from_fields(there.fields)
        return found

    def _join(self, worker: str) -> None:
        """Add a worker to the list of workers. Remove the workers that have no record any more."""

        def join(there: dict[str, Any]) -> dict[str, Any]:
            others = [w for w in _read_list(there) if w != worker]
            alive = [w for w in others if self._record_of(w) is not None]
            return {"workers": [*alive, worker]}

        self._records.update(_KIND, _LIST, {"workers": [worker]}, KEEP_SECONDS, join)

    def _record_of(self, worker: str) -> Record | None:
        """Return a worker's record, or ``None`` if there is none or another project wrote it."""
        try:
            return self._records.get(_KIND, _name(worker))
        except RecordRejected:
            return None

    def _workers(self) -> list[str]:
        there = self._records.get(_KIND, _LIST)
        return [] if there is None else _read_list(there.fields)


def _read_list(fields: Mapping[str, Any]) -> list[str]:
    """Return the names in the list of workers. A list that cannot be read counts as empty."""
    found = fields.get("workers")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _name(worker: str) -> str:
    return f"worker {worker}"
