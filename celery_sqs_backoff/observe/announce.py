"""Send Celery signals for events of a worker."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ..signals import lease_lost, provider_changed
from ..text import error_site
from ..threads import start_daemon
from . import events as of

logger = logging.getLogger(__name__)

#: At most this many signals wait while a receiver blocks. If more come, the oldest are dropped.
_MOST_WAITING: Final = 10_000


class Announce:
    """Sends the signals of :mod:`celery_sqs_backoff.signals` in order, from a thread of its own.

    The thread ends when no signal waits. If a receiver of signals blocks, only the later
    signals are delayed, not the worker.

    Args:
        task_named: returns the task with a given name, or ``None`` for an unknown task. The task is
            the sender of ``lease_lost``.
    """

    def __init__(self, task_named: Callable[[str], Any]) -> None:
        self._task_named = task_named
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, object, dict[str, str]]] = deque(maxlen=_MOST_WAITING)
        self._is_running = False
        #: The state of each provider and tenant, unless the state is "ok".
        self._states: dict[tuple[str, str], str] = {}

    def __call__(self, event: of.WorkerEvent) -> None:
        """Send the event's signal, if it has one."""
        if isinstance(event, of.LeaseLost):
            ids = {"task_id": event.task_id, "message_id": event.message_id}
            self._send(lease_lost, self._task_named(event.task), **ids, queue=event.queue)
        elif isinstance(event, of.OfProvider) and event.state is not None:
            key, state = (event.provider, event.tenant), event.state
            if self._states.pop(key, "ok") != state:
                self._send(provider_changed, event.provider, state=state, tenant=event.tenant)
            if state != "ok":
                self._states[key] = state

    def _send(self, signal: Any, sender: object, **facts: str) -> None:
        with self._lock:
            self._waiting.append((signal, sender, facts))
            if not self._is_running:
                self._is_running = start_daemon("sqs-signal", self._run) is not None
                if not self._is_running:
                    logger.warning(
                        "sqs_backoff.no_thread_left: no thread can be started; this signal is"
                        " sent with the next signal"
                    )

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                signal, sender, facts = self._waiting.popleft()
            try:
                signal.send(sender, **facts)
            except BaseException as exc:  # noqa: BLE001  # Celery's ``send`` catches only Exception
                logger.error("sqs_backoff.signal_failed: %s", error_site(exc))
