"""A thread that writes to the store what only this worker knows, for ``sqs-status``."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from celery.utils.log import get_logger

from ..observe.board import Board, ProviderNow, QueueNow, WorkerNow
from ..observe.events import DeadLettered, Event
from ..observe.metrics import GIVING_UP_SECONDS
from ..observe.waiting import Waiting
from ..store.settings import vault_of
from ..threads import start_daemon
from .lease import Lease

logger = get_logger(__name__)

#: Between two writes.
INTERVAL_SECONDS: Final = 10.0

#: After the first write, when there is not much to say yet.
_FIRST_PAUSE_SECONDS: Final = 3.0

#: How long the end of a worker waits for the thread.
_JOIN_SECONDS: Final = 2.0


class Bulletin:
    """Writes every ten seconds until it is stopped; a listener of the worker's events.

    A store that is away is logged once, and tried again; the worker does not wait for it.

    Args:
        app: the Celery app, which names the store.
        worker: this worker's name.
        waiting: the fold of what waits.
        running: how many tasks of a queue the pool is running.
        consumed: names of the queues that this worker has received from.
        held: the leases that are not settled, those of running messages too.
        providers: what is known of providers.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        app: Any,
        worker: str,
        *,
        waiting: Waiting,
        running: Callable[[str], int],
        consumed: Callable[[], Iterable[str]],
        held: Callable[[], Iterable[Lease]],
        providers: Callable[[], Iterable[ProviderNow]] = tuple,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._worker = worker
        self._waiting = waiting
        self._running = running
        self._consumed = consumed
        self._held = held
        self._providers = providers
        self._now = now
        self._dead_letters: dict[str, Counter[str]] = defaultdict(Counter)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Count what is given up."""
        if isinstance(event, DeadLettered):
            self._dead_letters[event.queue][event.reason] += 1

    def start(self) -> None:
        """Write from now on, in a thread."""
        self._thread = start_daemon("sqs-bulletin", self._run)
        if self._thread is None:
            logger.warning("sqs_backoff.no_thread_left: this worker is missing in sqs-status")

    def stop(self) -> None:
        """Write no more, and take the record down if the store answers soon."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        board: Board | None = None
        is_failing, pause = False, _FIRST_PAUSE_SECONDS
        while True:
            is_over = self._over.is_set()
            try:
                board = board or Board(vault_of(self._app))
                if is_over:
                    board.leave(self._worker)
                else:
                    board.write(self._worker, self.now())
                is_failing = False
            except Exception as exc:  # noqa: BLE001  # the store's client may raise anything
                if not is_failing:
                    # Not its text: a client's error may quote the URL, with its password.
                    logger.warning(
                        "sqs_backoff.no_status: the store does not take this worker's status (%s);"
                        " trying again",
                        type(exc.__cause__ or exc).__name__,
                    )
                is_failing = True
            if is_over:
                return
            self._over.wait(pause)
            pause = INTERVAL_SECONDS

    def now(self) -> WorkerNow:
        """Return what this worker knows at this moment."""
        leases: dict[str, list[Lease]] = defaultdict(list)
        for lease in self._held():
            leases[lease.queue.name].append(lease)
        waiting = self._waiting.queues()
        names = {*self._consumed(), *leases, *waiting, *list(self._dead_letters)}
        return WorkerNow(
            queues={name: self._queue(name, leases[name]) for name in names},
            providers=tuple(self._providers()),
        )

    def _queue(self, name: str, leases: list[Lease]) -> QueueNow:
        waiting = self._waiting.now(name, at=self._now(), horizon=GIVING_UP_SECONDS)
        running = self._running(name)
        ages = [waiting.oldest_sent_at, *(lease.delivery.sent_at for lease in leases)]
        return QueueNow(
            running=running,
            held=max(0, len(leases) - running),
            waiting=waiting.messages,
            oldest_sent_at=min((at for at in ages if at is not None), default=None),
            giving_up=waiting.giving_up,
            next_gives_up_at=waiting.next_gives_up_at,
            dead_letters=dict(self._dead_letters[name]) if name in self._dead_letters else {},
        )
