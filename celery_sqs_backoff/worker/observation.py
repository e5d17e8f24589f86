"""Starts a worker's observers: signals, heartbeat file, metrics page, record for ``sqs-status``."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from celery.utils.log import get_logger
from celery.worker import state

from ..observe.announce import Announce
from ..observe.board import Board, QueueNow, WorkerNow, find_first
from ..observe.health import Heartbeat
from ..observe.metrics import Metrics
from ..observe.waiting import Waiting
from ..sqs.queues import queue_name
from ..store.settings import is_store_shared, records_of
from ..text import type_name
from ..threads import start_daemon

if TYPE_CHECKING:
    from .receive import Receiver

logger = get_logger(__name__)

#: The heartbeat's log lines give Celery's loop this name.
EVENT_LOOP = "Celery's event loop"

#: Pause between two tries to open the port for metrics.
_AGAIN_SECONDS = 10.0

_DEFAULT_HOST = "127.0.0.1"

#: Pause between two writes of the worker's record for ``sqs-status`` to the store. The pause after
#: the first write is shorter, because the first record has few facts yet.
_INTERVAL_SECONDS: Final = 10.0
_FIRST_PAUSE_SECONDS: Final = 3.0

#: A stopping worker waits at most this long for the delete of its record from the store.
_JOIN_SECONDS: Final = 2.0


class Observation:
    """Starts and stops the observers of a worker.

    The app's setting ``sqs_backoff`` may have these keys. ``heartbeat`` is the path of the
    heartbeat file. ``prometheus_port`` and ``prometheus_host`` say where metrics and health are
    served. With ``status=False`` the worker writes no record to the store for ``sqs-status``.

    If an observer cannot start, for example because its library is missing, the worker logs the
    error, and starts the other observers.

    Args:
        app: the Celery app.
        worker: this worker's name.
        receiver: knows the worker's messages, queues and providers.
    """

    def __init__(self, app: Any, worker: str, receiver: Receiver) -> None:
        settings = app.conf.get("sqs_backoff")
        self._settings: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
        self._app, self._worker, self._receiver = app, worker, receiver
        self._events, self._pulse = receiver.keeper.events, receiver.keeper.pulse
        self._waiting = Waiting()
        self._over = threading.Event()
        self._stops: list[Callable[[], object]] = []

    def start(self) -> None:
        """Start the observers. Call this once per worker."""
        self._events.subscribe(Announce(self._app.tasks.get))
        self._events.subscribe(self._waiting)
        observers = {"heartbeat": self._beat, "metrics": self._serve, "status": self._publish}
        for name, start in observers.items():
            try:
                start()
            except Exception as exc:  # noqa: BLE001  # from a setting, a library or a plug-in
                logger.error("sqs_backoff.observer_failed: %s: %s: %s", name, type_name(exc), exc)

    def stop(self) -> None:
        """Stop the observers."""
        self._over.set()
        while self._stops:
            self._stops.pop()()

    def _beat(self) -> None:
        if path := self._settings.get("heartbeat"):
            heartbeat = Heartbeat(Path(path), self._pulse)
            heartbeat.start()
            self._stops.append(heartbeat.stop)

    # The record in the store

    def _publish(self) -> None:
        if not is_store_shared(self._app) or not self._settings.get("status", True):
            return
        thread = start_daemon("sqs-bulletin", self._write_until_over)
        if thread is None:
            logger.warning("sqs_backoff.no_thread_left: sqs-status does not show this worker")
        else:
            self._stops.append(lambda: thread.join(_JOIN_SECONDS))

    def _write_until_over(self) -> None:
        """Write the worker's record to the store until the worker stops. Then delete the record.

        If a write fails, try again after the usual pause. Of several failures in a row, log only
        the first.
        """
        board: Board | None = None
        is_failing, is_over, pause = False, False, _FIRST_PAUSE_SECONDS
        while True:
            try:
                board = board or Board(records_of(self._app))
                board.leave(self._worker) if is_over else board.write(self._worker, self.now())
                is_failing = False
            except Exception as exc:  # noqa: BLE001  # the store's client may raise anything
                if not is_failing:
                    # Do not log the error's text. It may quote the store's URL with its password.
                    logger.warning(
                        "sqs_backoff.no_status: the store does not take this worker's status (%s);"
                        " trying again",
                        type(exc.__cause__ or exc).__name__,
                    )
                is_failing = True
            if is_over:
                return
            is_over, pause = self._over.wait(pause), _INTERVAL_SECONDS

    def now(self) -> WorkerNow:
        """Return the present state of the worker's queues and providers."""
        sent_at: dict[str, list[float | None]] = defaultdict(list)
        for lease in self._receiver.keeper.held():
            sent_at[lease.queue.name].append(lease.delivery.sent_at)
        queues: dict[str, QueueNow] = {}
        for name in {*self._receiver.consumed(), *sent_at, *self._waiting.queues()}:
            known, tasks = self._waiting.now(name), running(name)
            queues[name] = replace(
                known,
                running=tasks,
                held=max(0, len(sent_at[name]) - tasks),
                oldest_sent_at=find_first([known.oldest_sent_at, *sent_at[name]]),
            )
        return WorkerNow(queues=queues, providers=tuple(self._receiver.gates.now()))

    # The page of metrics, and health

    def _serve(self) -> None:
        """Serve metrics and health. If the port is taken, try again later in a thread.

        After a restart, the old worker may use the port until all processes of the old worker have
        ended.
        """
        if self._settings.get("prometheus_port") is None:
            return
        host = str(self._settings.get("prometheus_host") or _DEFAULT_HOST)
        port = int(self._settings["prometheus_port"])
        page = self._page()
        if (why := self._try_to_serve(host, port, page)) is None:
            return
        logger.error("sqs_backoff.no_metrics: port %s: %s; trying again later", port, why)

        def try_again() -> None:
            while not self._over.wait(_AGAIN_SECONDS):
                if self._try_to_serve(host, port, page) is None:
                    return

        threading.Thread(target=try_again, name="sqs-observe-again", daemon=True).start()

    def _try_to_serve(
        self, host: str, port: int, page: Callable[[], tuple[bytes, str]] | None
    ) -> OSError | None:
        from ..observe.http import serve

        try:
            server = serve(host, port, metrics=page, faults=self._pulse.faults)
        except OSError as exc:
            return exc
        self._stops += [server.server_close, server.shutdown]
        logger.info("sqs_backoff.metrics: http://%s:%d/metrics", host, server.server_port)
        return None

    def _page(self) -> Callable[[], tuple[bytes, str]] | None:
        """Return a function that makes the metrics page. ``None``: the library is not installed."""
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ImportError as exc:
            logger.error(
                "sqs_backoff.no_metrics: %s: pip install 'celery-sqs-backoff[prometheus]'", exc
            )
            return None
        metrics = Metrics(self.now)
        self._events.subscribe(metrics)
        registry = CollectorRegistry()
        registry.register(metrics)
        return lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)


def running(queue: str) -> int:
    """Return how many tasks of a queue are running in the pool.

    Tasks without our base class count, too. So do running tasks after the worker has lost their
    messages.

    Args:
        queue: the queue's name on SQS.
    """
    urls = (each.message.delivery_info.get("sqs_queue", "") for each in active_requests())
    return sum(queue_name(url) == queue for url in urls)


def active_requests() -> list[Any]:
    """Return Celery's requests for the tasks that are running in the pool."""
    while True:
        with suppress(RuntimeError):  # Celery's loop changed the set during the copy, so try again
            return list(state.active_requests)
