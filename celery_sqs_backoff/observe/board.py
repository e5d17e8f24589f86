"""The records in the store in which workers publish what only they know, for ``sqs-status``.

Each worker has one small record. It expires after a minute, so a worker that is gone is not counted
for long. It holds names of queues and numbers, but no content of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ..store.protocol import KEEP_SECONDS
from ..store.records import Record, Records

#: A record is written several times in this time; then it is taken for that of a dead worker.
TTL_SECONDS: Final = 60.0

#: Providers of one worker, each tenant counted, paused ones first.
_MOST_PROVIDERS: Final = 100

#: States of a provider, the worst first.
_WORST_FIRST: Final = ("paused", "recovering", "ok")

#: Kind of the records, and name of the one that lists the workers.
_KIND: Final = "status"
_LIST: Final = "workers"


def find_first(times: Iterable[float | None]) -> float | None:
    """Return the earliest of the times that are known."""
    return min((at for at in times if at is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class QueueNow:
    """Numbers of one worker for one queue. Times are seconds since the epoch.

    Attributes:
        running: tasks that its pool is running, those without the base class too.
        held: messages that it has received and not started.
        waiting: messages that it has hidden and that are not due yet.
        oldest_sent_at: when the oldest of all these was sent.
        oldest_due_at: the same of the waiting messages, but one with an ETA counts from its ETA.
        next_gives_up_at: when the first waiting message gives up.
        dead_letters: messages given up since the worker started, by reason.
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
        provider: its name.
        tenant: a digest that stands for the tenant; empty = no tenant.
        state: ``"paused"``, ``"recovering"`` or ``"ok"``.
        hidden: messages that it could bring forward.
        in_line: messages that wait here for a slot at its rate, or for their turn.
        rate: calls a second that it may make while the provider recovers; else 0.
    """

    provider: str
    tenant: str = ""
    state: str
    hidden: int = 0
    in_line: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Name of the provider, with the tenant."""
        return f"{self.provider}[{self.tenant}]" if self.tenant else self.provider

    @property
    def badness(self) -> tuple[int, int]:
        """Key that sorts paused providers first, then the ones with most messages."""
        return _WORST_FIRST.index(self.state), -self.hidden - self.in_line


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """Record of one worker."""

    queues: Mapping[str, QueueNow] = field(default_factory=dict)
    providers: tuple[ProviderNow, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        """Return the record for the store, with the worst providers."""
        providers = sorted(self.providers, key=lambda one: one.badness)[:_MOST_PROVIDERS]
        return asdict(replace(self, providers=tuple(providers)))

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> WorkerNow:
        """Read a record, which another version may have written.

        Raises:
            ValueError: it is something else.
        """
        try:
            queues = {name: _read(QueueNow, one) for name, one in found["queues"].items()}
            return cls(
                queues=queues, providers=tuple(_read(ProviderNow, p) for p in found["providers"])
            )
        except (AttributeError, KeyError, TypeError) as exc:
            raise ValueError("not a worker's record") from exc


def _read(kind: Any, found: Mapping[str, Any]) -> Any:
    return kind(**{name: v for name, v in found.items() if name in kind.__dataclass_fields__})


class Board:
    """The records of all workers of a project.

    Args:
        records: the project's. Their errors are raised by every method.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._last: dict[str, Record] = {}

    def write(self, worker: str, now: WorkerNow) -> None:
        """Publish a worker's record, mostly with two calls of the store.

        Args:
            worker: its name.
            now: its record.
        """
        fields, last = now.as_fields(), self._last.pop(worker, None)
        written = last and self._records.replace(last, fields, TTL_SECONDS)
        self._last[worker] = written or self._records.update(
            _KIND, _name(worker), fields, TTL_SECONDS, lambda _: fields
        )
        if worker not in self._workers():
            self._join(worker)

    def leave(self, worker: str) -> None:
        """Delete a worker's record."""
        if (last := self._last.pop(worker, None)) is not None:
            self._records.delete(last)

    def read(self) -> dict[str, WorkerNow]:
        """Return the records that are not over, by worker."""
        found = {}
        for worker in self._workers():
            if (there := self._records.get(_KIND, _name(worker))) is not None:
                with suppress(ValueError):
                    found[worker] = WorkerNow.from_fields(there.fields)
        return found

    def _join(self, worker: str) -> None:
        """Add the worker to the list, and drop workers without a record."""

        def join(there: dict[str, Any]) -> dict[str, Any]:
            alive = [w for w in there["workers"] if self._records.get(_KIND, _name(w)) is not None]
            return {"workers": [*(w for w in alive if w != worker), worker]}

        self._records.update(_KIND, _LIST, {"workers": [worker]}, KEEP_SECONDS, join)

    def _workers(self) -> list[str]:
        there = self._records.get(_KIND, _LIST)
        return [] if there is None else list(there.fields["workers"])


def _name(worker: str) -> str:
    return f"worker {worker}"
