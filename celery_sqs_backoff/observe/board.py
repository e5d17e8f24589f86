"""Where workers write what only they know, for ``sqs-status``: one small record each, in the store.

A record ends by itself after a minute, so a worker that is gone is not counted for long. Names of
queues and numbers, nothing of messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..store.protocol import KEEP_SECONDS, Store, key_of

#: A record is written several times in this time; then it is taken for that of a dead worker.
TTL_SECONDS: Final = 60.0

#: Names in the list of workers; the oldest are dropped.
_MOST_WORKERS: Final = 1_000

#: Queues of one worker, which has a thread for each.
_MOST_QUEUES: Final = 1_000

#: Providers of one worker, each tenant's gate counted; those that are down first.
_MOST_PROVIDERS: Final = 100

#: States of a provider, the worst first.
_WORST_FIRST: Final = ("open", "probing", "closed")

#: How often to try to change the list of workers while others change it too.
_TRIES: Final = 20


@dataclass(frozen=True, kw_only=True)
class QueueNow:
    """What one worker knows of one queue.

    Attributes:
        running: tasks that its pool is running, those without the base class too.
        held: messages that it has received and not started.
        waiting: messages that it has hidden and that are not due yet.
        oldest_sent_at: when the oldest of all these was sent, in seconds since the epoch.
        giving_up: waiting messages whose ``retry_for`` is over within two hours.
        next_gives_up_at: when the first of them gives up.
        dead_letters: messages given up since the worker started, by reason.
    """

    running: int = 0
    held: int = 0
    waiting: int = 0
    oldest_sent_at: float | None = None
    giving_up: int = 0
    next_gives_up_at: float | None = None
    dead_letters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProviderNow:
    """What one worker knows of one provider.

    Attributes:
        name: of the provider.
        state: ``"closed"``, ``"open"`` or ``"probing"``, as of a circuit breaker.
        waiting: messages that it could bring forward.
    """

    name: str
    state: str
    waiting: int = 0

    @property
    def badness(self) -> tuple[int, int]:
        """To sort by, the worst first: those that are down, then those that most waits for."""
        known = self.state in _WORST_FIRST
        return (_WORST_FIRST.index(self.state) if known else 0, -self.waiting)


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """What one worker knows."""

    queues: Mapping[str, QueueNow] = field(default_factory=dict)
    providers: tuple[ProviderNow, ...] = ()

    def as_text(self) -> str:
        """As it is stored: of most queues there is nothing to say but their names."""
        idle, queues = asdict(QueueNow()), sorted(self.queues.items())[:_MOST_QUEUES]
        providers = sorted(self.providers, key=lambda one: one.badness)[:_MOST_PROVIDERS]
        return json.dumps(
            {
                "queues": {
                    name: {k: v for k, v in asdict(queue).items() if v != idle[k]}
                    for name, queue in queues
                },
                "providers": [asdict(provider) for provider in providers],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> WorkerNow:
        """As it was stored, perhaps by another version.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(text)
            return cls(
                queues={
                    str(name): QueueNow(**_known(QueueNow, queue))
                    for name, queue in found["queues"].items()
                },
                providers=tuple(ProviderNow(**_known(ProviderNow, p)) for p in found["providers"]),
            )
        except (AttributeError, KeyError, TypeError) as exc:
            raise ValueError("not a worker's record") from exc


def _known(kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in kind.__dataclass_fields__}


_WORKERS: Final = key_of("status", "workers")


class Board:
    """The records of all workers of a project.

    Args:
        store: the project's. Its errors are raised by every method.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, str] = {}

    def write(self, worker: str, now: WorkerNow) -> None:
        """Put up a worker's record; two calls of the store, mostly.

        Args:
            worker: its name.
            now: what it knows.
        """
        key, text = _key(worker), now.as_text()
        last = self._last.get(worker)
        if last is None or not self._store.replace(key, last, text, TTL_SECONDS):
            there = self._store.add(key, text, TTL_SECONDS)
            if there is not None:
                self._store.replace(key, there, text, TTL_SECONDS)
        self._last[worker] = text
        self._join(worker)

    def leave(self, worker: str) -> None:
        """Take a worker's record down."""
        if (last := self._last.pop(worker, None)) is not None:
            self._store.delete(_key(worker), last)

    def read(self) -> dict[str, WorkerNow]:
        """Return the records that are not over, by worker."""
        found = {}
        for worker in self._workers()[1]:
            if (text := self._store.get(_key(worker))) is not None:
                with suppress(ValueError):
                    found[worker] = WorkerNow.from_text(text)
        return found

    def _join(self, worker: str) -> None:
        """Put the worker on the list, and take those off it that have no record any more."""
        for _ in range(_TRIES):
            old, workers = self._workers()
            if worker in workers:
                return
            alive = [one for one in workers if self._store.get(_key(one)) is not None]
            new = json.dumps([*alive, worker][-_MOST_WORKERS:])
            if old is None:
                if self._store.add(_WORKERS, new, KEEP_SECONDS) is None:
                    return
            elif self._store.replace(_WORKERS, old, new, KEEP_SECONDS):
                return

    def _workers(self) -> tuple[str | None, list[str]]:
        text = self._store.get(_WORKERS)
        try:
            found = json.loads(text or "[]")
        except ValueError:
            found = []
        return text, [str(one) for one in found] if isinstance(found, list) else []


def _key(worker: str) -> str:
    return key_of("status", "worker", worker)
