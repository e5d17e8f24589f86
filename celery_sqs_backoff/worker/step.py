"""The part of the worker that every task of ours brings along: a Celery bootstep."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.utils.log import get_logger
from celery.worker.consumer.tasks import Tasks

from ..limits import MAX_MAX_RECEIVE_COUNT
from ..options import DEAD_LETTER
from ..task import SQSBackoffTask
from . import prefetch, unreadable, upstream
from .keeper import Keeper
from .messages import WANTED_ATTRIBUTES, Receiver

__all__ = ["LeaseStep"]

logger = get_logger(__name__)

#: How long a worker that stops tries to tell SQS what became of its messages.
FLUSH_TIMEOUT_SECONDS = 15.0


class LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is not typed
    """Starts the keeper, and attaches it to the consumer's channel at every (re)connect."""

    requires = (Tasks,)

    def include_if(self, c: Any) -> bool:
        return bool(c.conninfo.transport.driver_type == "sqs")

    def create(self, c: Any) -> None:
        """Before any start(): Tasks.start() asks each task for its strategy."""
        self._keeper = Keeper()
        upstream.declare_without_leave_to_look(c)
        c.sqs_receiver = Receiver(self._keeper, soon=_soon(c))
        upstream.give_back_before_soft_shutdown(c, self._give_back_unstarted)
        self._blocks_loop = isinstance(c.pool, solo.TaskPool)
        upstream.remember_running_tasks(c)
        if self._blocks_loop or type(c.pool).__module__ == "celery.concurrency.gevent":
            upstream.run_after_receiving(c)

    def start(self, c: Any) -> None:
        """Run before the first message is asked for: after Tasks, before the event loop."""
        channel = c.task_consumer.channel
        if c.hub is not None:
            upstream.wake_event_loop(c.hub)
            upstream.call_beside_event_loop(c.hub)
        upstream.survive_bodies_without_json(channel)
        upstream.ask_for_attributes(channel, WANTED_ATTRIBUTES)
        prefetch.install(
            channel,
            keeper=self._keeper,
            processes=c.pool.num_processes,
            # What is received while a task blocks the loop would be noticed, and renewed, too late.
            only_when_idle=self._blocks_loop,
        )
        unreadable.install(c, c.sqs_receiver)
        self._keeper.start()
        atexit.register(self.shutdown, c)  # some ends of a worker skip its blueprint's shutdown
        self._check_queues(c, channel)

    def stop(self, c: Any) -> None:
        """Run at every reconnect, and when a shutdown begins: nobody will start what waits.

        Those messages are given back at once; the running ones keep their leases.
        """
        upstream.keep_event_loop(c)
        self._give_back_unstarted()

    def terminate(self, c: Any) -> None:
        self.stop(c)

    def shutdown(self, c: Any) -> None:
        """Run after the pool has stopped: whatever will be settled has been."""
        atexit.unregister(self.shutdown)
        self._keeper.stop(FLUSH_TIMEOUT_SECONDS)
        c.sqs_receiver.lost_flags.clear()

    def _give_back_unstarted(self) -> None:
        for lease in self._keeper.held():
            if not lease.handed_to_pool():
                lease.give_back_unrun()

    def _check_queues(self, c: Any, channel: Any) -> None:
        tasks = [task for task in c.app.tasks.values() if isinstance(task, SQSBackoffTask)]
        wants_dlq = any(task.backoff_options.on_give_up == DEAD_LETTER for task in tasks)
        needed, hungriest = max(
            ((task.backoff_options.receives_needed, task.name) for task in tasks), default=(0, "")
        )
        for kombu_queue in c.task_consumer.queues:
            url = channel._resolve_queue_url(kombu_queue.name)
            name = channel.canonical_queue_name(kombu_queue.name)
            queue = c.sqs_receiver.queue(url, channel.sqs(queue=name))
            if wants_dlq and queue.is_read and queue.dlq_url is None:
                logger.warning(
                    "Queue %s has no dead-letter queue: tasks that are given up will fail and"
                    " their messages will be deleted (on_give_up='fail').",
                    queue.name,
                )
            if queue.max_receive_count is not None and queue.max_receive_count < needed:
                logger.warning(
                    "Queue %s has maxReceiveCount=%d, but with its delays task %s may need about %d"
                    " receives: it will be given up before retry_for or max_retries say so."
                    " SQS allows up to %d.",
                    queue.name,
                    queue.max_receive_count,
                    hungriest,
                    needed,
                    MAX_MAX_RECEIVE_COUNT,
                )


def _soon(c: Any) -> Callable[[Callable[[], object]], object]:
    """How to run something in the consumer's event loop, or, without one, in a greenlet."""
    if c.hub is not None:
        return c.hub.call_soon  # type: ignore[no-any-return]
    return lambda callback: c.timer.call_after(0, callback)
