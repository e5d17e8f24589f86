"""The observers of one worker, each a listener of its events: what the app's settings ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from celery.utils.log import get_logger

from ..observe.announce import Announce
from ..observe.board import ProviderNow, WorkerNow
from ..observe.health import Heartbeat, Pulse
from ..observe.metrics import Metrics
from ..observe.stream import Events
from ..observe.waiting import Waiting
from ..store.settings import is_shared
from ..text import type_name
from .bulletin import Bulletin, know_of
from .lease import Lease

logger = get_logger(__name__)

#: What the heartbeat calls Celery's loop.
EVENT_LOOP = "Celery's event loop"

#: Between two tries to have the port.
_AGAIN_SECONDS = 10.0

_DEFAULT_HOST = "127.0.0.1"


class Observation:
    """Starts the observers. The settings, in the app's ``sqs_backoff``:

    ``heartbeat``: path of the heartbeat file; ``prometheus_port`` and ``prometheus_host``: where
    metrics and health are served; ``status=False``: nothing is written to the store for
    ``sqs-status``.

    Nothing that fails here stops the worker: a port that is taken, or a library that is missing or
    half set up, is logged, and the others start.

    Args:
        app: the Celery app.
        worker: this worker's name.
        events: of the worker.
        pulse: of the worker.
        running: how many tasks of a queue the pool is running.
        consumed: names of the queues that this worker has received from.
        held: the leases that are not settled.
        providers: what is known of providers.
    """

    def __init__(
        self,
        app: Any,
        worker: str,
        *,
        events: Events,
        pulse: Pulse,
        running: Callable[[str], int],
        consumed: Callable[[], Iterable[str]] = tuple,
        held: Callable[[], Iterable[Lease]] = tuple,
        providers: Callable[[], Iterable[ProviderNow]] = tuple,
    ) -> None:
        settings = app.conf.get("sqs_backoff")
        self._settings: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
        self._app = app
        self._worker = worker
        self._events = events
        self._pulse = pulse
        self._running = running
        self._consumed = consumed
        self._held = held
        self._providers = providers
        self._waiting = Waiting()
        self._stops: list[Callable[[], object]] = []

    def start(self) -> None:
        """Start the observers; once per worker."""
        self._stops.append(self._events.subscribe(Announce(self._app.tasks.get)))
        self._stops.append(self._events.subscribe(self._waiting))
        # Of the settings, of a library or of its plug-ins: whatever it is, the worker works.
        try:
            self._beat()
        except Exception as exc:  # noqa: BLE001
            logger.error("sqs_backoff.no_heartbeat: %s: %s", type_name(exc), exc)
        try:
            self._serve()
        except Exception as exc:  # noqa: BLE001
            logger.error("sqs_backoff.no_metrics: %s: %s", type_name(exc), exc)
        self._publish()

    def stop(self) -> None:
        """Stop them."""
        while self._stops:
            self._stops.pop()()

    def _beat(self) -> None:
        if path := self._settings.get("heartbeat"):
            heartbeat = Heartbeat(Path(path), self._pulse)
            heartbeat.start()
            self._stops.append(heartbeat.stop)

    def _publish(self) -> None:
        if not is_shared(self._settings.get("store")) or not self._settings.get("status", True):
            return
        bulletin = Bulletin(self._app, self._worker, self._know)
        bulletin.start()
        self._stops.append(bulletin.stop)

    def _know(self) -> WorkerNow:
        return know_of(
            self._waiting,
            running=self._running,
            consumed=self._consumed(),
            held=self._held(),
            providers=self._providers(),
        )

    def _serve(self) -> None:
        """Serve the page, and if the port is taken try again in a thread.

        The port of a worker that is replaced is free when its processes have ended.
        """
        if self._settings.get("prometheus_port") is None:
            return
        host = str(self._settings.get("prometheus_host") or _DEFAULT_HOST)
        port = int(self._settings["prometheus_port"])
        page, over = self._page(), threading.Event()
        self._stops.append(over.set)
        if (why := self._try_to_serve(host, port, page)) is None:
            return
        logger.error(
            "sqs_backoff.no_metrics: port %s: %s; trying again every %g s",
            port,
            why,
            _AGAIN_SECONDS,
        )

        def try_again() -> None:
            while not over.wait(_AGAIN_SECONDS):
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
        """Return what makes the page of metrics; ``None``: the library is missing."""
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ImportError as exc:
            logger.error(
                "sqs_backoff.no_metrics: %s: pip install 'celery-sqs-backoff[prometheus]'", exc
            )
            return None
        metrics = Metrics(self._waiting, running=self._running, providers=self._providers)
        self._stops.append(self._events.subscribe(metrics))
        registry = CollectorRegistry()
        registry.register(metrics)
        return lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)
