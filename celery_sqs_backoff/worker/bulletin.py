"""A thread that writes to the store what only this worker knows, for ``sqs-status``."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from celery.utils.log import get_logger

from ..observe.board import Board, ProviderNow, QueueNow, WorkerNow
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
    """Writes every ten seconds until it is stopped.

    A store that is away is logged once, and tried again; the worker does not wait for it.

    Args:
        app: the Celery app, which names the store.
        worker: this worker's name.
        now: returns what it knows.
    """

    def __init__(self, app: Any, worker: str, now: Callable[[], WorkerNow]) -> None:
        self._app = app
        self._worker = worker
        self._now = now
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Publish from now on, in a thread."""
        self._thread = start_daemon("sqs-bulletin", self._run)
        if self._thread is None:
            logger.warning("sqs_backoff.no_thread_left: this worker is missing in sqs-status")

    def stop(self) -> None:
        """Stop publishing, and delete the record if the store responds in time."""
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
                    board.write(self._worker, self._now())
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


def know_of(
    waiting: Waiting,
    *,
    running: Callable[[str], int],
    consumed: Iterable[str],
    held: Iterable[Lease],
    providers: Iterable[ProviderNow] = (),
) -> WorkerNow:
    """Return what a worker knows at this moment.

    Args:
        waiting: the fold of the messages that wait.
        running: how many tasks of a queue the pool is running.
        consumed: names of the queues that the worker has received from.
        held: the leases that are not settled, those of running messages too.
        providers: what it knows of providers.
    """
    sent_at: dict[str, list[float | None]] = defaultdict(list)
    for lease in held:
        sent_at[lease.queue.name].append(lease.delivery.sent_at)
    queues: dict[str, QueueNow] = {}
    for name in {*consumed, *sent_at, *waiting.queues()}:
        known, tasks = waiting.now(name), running(name)
        ages = [known.oldest_sent_at, *sent_at[name]]
        queues[name] = replace(
            known,
            running=tasks,
            held=max(0, len(sent_at[name]) - tasks),
            oldest_sent_at=min((at for at in ages if at is not None), default=None),
        )
    return WorkerNow(queues=queues, providers=tuple(providers))
