"""The Celery bootstep that adds this package's parts to a worker's main process.

A worker has the step if its app has an ``SQSBackoffTask``. It uses the step only if the
broker is SQS.
"""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Iterable
from typing import Any

from celery import bootsteps, signals
from celery.concurrency import solo
from celery.utils.log import get_logger
from celery.worker.consumer.tasks import Tasks

from ..sqs.handshakes import guard_forks
from ..sqs.queues import Queue, queue_name
from ..text import name_some
from . import consume, upstream
from .check_up import start_check_up
from .keeper import Keeper
from .observation import EVENT_LOOP, Observation, active_requests
from .providers import introduce
from .receive import Receiver, name_among_workers
from .request import BackoffRequest
from .upstream import is_pool_of

logger = get_logger(__name__)

#: How long a stopping worker waits until SQS has confirmed all settlements.
FLUSH_TIMEOUT_SECONDS = 15.0

#: Celery's event loop notes a turn (a sign of life) once in ``_TURN_SECONDS``. The heartbeat counts
#: the loop as hanging after ``_LONGEST_TURN_SECONDS`` without a turn.
_TURN_SECONDS = 5.0
_LONGEST_TURN_SECONDS = 60.0

#: How many tasks the worker names in its log line at the start. An app may have hundreds.
_MAX_NAMES = 20


class LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is not typed
    """Starts the parts that receive, renew and settle messages in place of kombu.

    The receiver has the pollers, which receive messages. The keeper renews and settles messages. At
    each connect, the step replaces the receives, acks and rejects of kombu's new channel.
    """

    requires = (Tasks,)

    def include_if(self, c: Any) -> bool:
        return bool(c.conninfo.transport.driver_type == "sqs")

    def create(self, c: Any) -> None:
        """Create the keeper and the receiver.

        Celery calls this before ``Tasks.start()``, which needs the receiver.
        """
        self._keeper = Keeper()
        self._receiver = c.sqs_receiver = Receiver(c, self._keeper)
        consume.install(c, self._receiver)
        self._keeper.pulse.check(self._receiver.gates.pacer.fault)
        self._has_introduced_itself = False
        self._wake_event_loop: Callable[[], None] = lambda: None
        signals.worker_shutting_down.connect(self._notice_shutdown)
        self._observation = Observation(c.app, name_among_workers(c), self._receiver)
        if is_pool_of(c.pool, "prefork"):
            guard_forks()
        upstream.declare_without_asking(c)
        upstream.give_back_before_soft_shutdown(c, self._receiver.pause)
        upstream.remember_running_tasks(c)

    def start(self, c: Any) -> None:
        """Attach the parts to kombu's channel, and start the keeper.

        Celery calls this at each connect, after its step ``Tasks`` and before the event loop.
        """
        if c.hub is not None:
            self._wake_event_loop = upstream.wake_event_loop(c.hub)
        channel = c.task_consumer.channel
        self._receiver.attach(channel)
        consume.settle_by_leases(channel, self._receiver)
        self._watch_event_loop(c)
        self._keeper.start()
        atexit.register(self.shutdown, c)  # a worker may end without its blueprint's shutdown
        if not self._has_introduced_itself:
            self._has_introduced_itself = True
            self._observation.start()
            self._check_queues(c)

    def stop(self, c: Any) -> None:
        """Stop receiving. Celery calls this at every reconnect and shutdown.

        Give back the messages of tasks that have not started, so that other workers can receive
        them. Keep and renew the messages of running tasks.
        """
        self._keeper.pulse.forget(EVENT_LOOP)
        self._receiver.pause()

    terminate = stop

    def shutdown(self, c: Any) -> None:
        """Settle all messages and stop all threads. Celery calls this when the pool has stopped."""
        atexit.unregister(self.shutdown)
        self._receiver.gates.pacer.stop()
        for request in active_requests():
            if isinstance(request, BackoffRequest):
                request.cut_short()
        self._keeper.stop(FLUSH_TIMEOUT_SECONDS)
        self._receiver.gates.hand_over()
        self._observation.stop()
        shutil.rmtree(self._receiver.lost_flags, ignore_errors=True)

    def _notice_shutdown(self, **_: object) -> None:
        """Wake the event loop, so that it sees the stop flag that Celery sets after this.

        Celery calls this in its signal handler. In plain Celery, a timer of kombu's polling wakes
        the loop each second. Our pollers have threads of their own, so the loop may sleep for more
        than a second.
        """
        self._wake_event_loop()

    def _watch_event_loop(self, c: Any) -> None:
        """Let the heartbeat watch Celery's event loop.

        Do not watch it with the pool solo, where each task blocks the loop until it ends.
        """
        if isinstance(c.pool, solo.TaskPool):
            return
        pulse = self._keeper.pulse
        pulse.watch(EVENT_LOOP, limit_seconds=_LONGEST_TURN_SECONDS)
        if c.hub is not None:  # else timers run in another thread; Inbox.drain_events notes turns
            c.timer.call_repeatedly(_TURN_SECONDS, pulse.note_turn, (EVENT_LOOP,))

    def _check_queues(self, c: Any) -> None:
        """Read the queues' attributes, log the start line, and start the checks of the set-up."""
        channel, receiver = c.task_consumer.channel, c.sqs_receiver
        urls = [channel._resolve_queue_url(queue.name) for queue in c.task_consumer.queues]
        queues = [receiver.read_queue(url) for url in urls]
        tasks = c.app.tasks
        covered = [each for each in c.strategies if getattr(tasks.get(each), "is_covered", False)]
        others = {each for each in c.strategies if not each.startswith("celery.")} - {*covered}
        logger.info(
            "sqs_backoff.started: queues: %s; tasks of SQSBackoffTask: %s; other tasks: %s",
            "; ".join(map(_describe, queues)) or "none",
            _names(covered),
            _names(others),
        )
        names = [queue.name for queue in c.task_consumer.queues]
        start_check_up(c.app, list(zip(names, queues, strict=True)))
        introduce(c.app, [tasks[name] for name in covered])


def _describe(queue: Queue) -> str:
    if not queue.is_read:
        return f"{queue.name} (attributes not read yet)"
    dlq = "no dead-letter queue"
    if queue.dlq_arn is not None:
        name = queue_name(queue.dlq_arn)
        dlq = f"dead-letter queue {name} after {queue.max_receive_count} receives"
    return f"{queue.name} (visibility timeout {queue.visibility_timeout_seconds} s, {dlq})"


def _names(names: Iterable[str]) -> str:
    return name_some(sorted(names), _MAX_NAMES) or "none"
