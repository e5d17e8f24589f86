"""Receives for a worker: one poller per consumed queue, and the inbox that Celery's loop drains."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final
from uuid import uuid4

from celery.utils.log import get_logger
from celery.worker import state

from ..observe.events import Started
from ..sqs.clients import Clients
from ..sqs.limits import MAX_WAIT_TIME_SECONDS
from . import unreadable, upstream
from .ends import is_stopping
from .foreign import Foreign
from .gates import Gates
from .inbox import Arrival, Inbox
from .keeper import Keeper
from .lease import Lease, State, may_start
from .messages import Receiver
from .observation import EVENT_LOOP
from .poller import Poller
from .providers import fleet_of
from .request import BackoffRequest, was_handed_to_pool
from .strategy import is_kept_back_at_start
from .upstream.pools import is_pool_of
from .window import Window

logger = get_logger(__name__)

#: Of this process: in containers, each worker may be process 1.
_MARK: Final = uuid4().hex[:8]

#: Pools in which handing a task over may wait until it, or another, has ended.
_BLOCKING_POOLS = ("solo", "gevent", "eventlet")


class Receive:
    """Everything between SQS and Celery's consumer, for the life of a worker.

    Arguments:
        consumer: Celery's, which has no channel yet.
        keeper: who renews and settles the leases.
    """

    def __init__(self, consumer: Any, keeper: Keeper) -> None:
        self._consumer = consumer
        self._channel: Any = None
        self._pollers: dict[str, Poller] = {}
        self._keeper = keeper
        self._clients = Clients()
        self._window = Window(
            processes=lambda: _processes(consumer),
            multiplier=lambda: int(consumer.prefetch_multiplier),
            waiting_for=keeper.waiting_for,
        )
        self.receiver = Receiver(
            keeper,
            clients=self._clients,
            window=self._window,
            foreign=Foreign(
                (consumer.app.conf.get("sqs_backoff") or {}).get("foreign") or {},
                is_registered=lambda name: name in consumer.strategies,
                origin=consumer.hostname,
            ),
            retry_for=lambda name: _retry_for_of(consumer.app.tasks.get(name)),
            gates=self._gates,
        )
        self._inbox = Inbox(
            deliver=self._deliver,
            window=self._window,
            is_stopping=is_stopping,
            soon=_soon(consumer.hub),
            one_at_a_time=_blocks(consumer.pool),
            on_error=self._on_error,
            on_turn=lambda: keeper.pulse.turned(EVENT_LOOP),
        )
        self.receiver.deliver = self._inbox.put
        self.receiver.keep = lambda lease, headers, what: unreadable.keep(
            lease, headers, what, worker=consumer.hostname
        )
        self._note_started_tasks(consumer)

    def _gates(self, room: Callable[[], int]) -> Gates:
        app = self._consumer.app
        return Gates(
            self._keeper,
            calls=self._clients.settling,
            room=room,
            fleet=fleet_of(app, worker=name_among_workers(self._consumer)),
        )

    def attach(self, channel: Any) -> None:
        """Deliver through this channel from now on. Call it before the channel consumes."""
        self._channel = channel
        self._clients.attach(channel)
        self._inbox.clear()
        self.receiver.open()
        upstream.receive_ourselves(
            channel,
            on_consume=self._start,
            on_cancel=self._stop,
            drain_events=self._inbox.drain_events,
        )
        self._settle_by_leases(channel)
        unreadable.install(self._consumer, self.receiver)

    def pause(self) -> None:
        """Stop receiving; give back messages that have not started, and those that still arrive."""
        self.receiver.close()
        for poller in self._pollers.values():
            poller.stop()
        self._inbox.clear()
        for lease in self._keeper.held():
            if not lease.handed_to_pool():
                lease.give_back()

    # Pollers

    def _start(self, name: str) -> None:
        poller = self._pollers.get(name)
        if poller is None:
            poller = self._pollers[name] = self._poller(name)
        poller.start()

    def _stop(self, name: str) -> None:
        if name in self._pollers:
            self._pollers[name].stop()

    def _poller(self, name: str) -> Poller:
        url = self._channel._resolve_queue_url(name)
        receiver = self.receiver

        def take(
            messages: list[dict[str, Any]], seconds_ago: float, hidden_seconds: int | None
        ) -> None:
            receiver.take(
                name, url, messages, seconds_ago=seconds_ago, hidden_seconds=hidden_seconds
            )

        return Poller(
            url,
            calls=self._clients.polling(url),
            window=self._window,
            take=take,
            before_each=lambda: receiver.read_queue(url),
            wait_seconds=_wait_seconds(self._channel),
            pause_seconds=max(0.0, float(self._channel.connection.polling_interval or 0)),
            clock=self._keeper.clock,
            visibility_timeout_seconds=lambda: self._keeper.seconds_to_receive_for(
                receiver.queue(url)
            ),
            events=self._keeper.events,
            pulse=self._keeper.pulse,
        )

    # Celery's loop

    def _deliver(self, arrival: Arrival) -> None:
        if arrival.again is not None:
            arrival.again()
            return
        channel = self._channel
        if arrival.queue not in channel.connection._callbacks:
            # Its queue has been cancelled meanwhile ("cancel_consumer"). kombu would reject it on
            # whatever channel it finds first, which need not be ours.
            arrival.lease.give_back()
            return
        channel.connection._deliver(arrival.payload, arrival.queue)
        # What becomes of it is the lease's business: kombu need not hold, or restore, it.
        channel.qos.ack(arrival.tag)

    def _on_error(self, arrival: Arrival, exc: BaseException) -> None:
        """Keep a message that Celery or kombu failed to accept, unless its task is running."""
        what = f"its headers or its body cannot be used ({type(exc).__name__})"
        if arrival.lease.state is State.HELD and not arrival.lease.handed_to_pool():
            self.receiver.keep(arrival.lease, {}, what)

    def _settle_by_leases(self, channel: Any) -> None:
        """Make kombu's ack and reject settle the message's lease."""

        def basic_ack(delivery_tag: str, multiple: bool = False) -> None:
            if (lease := self.receiver.lease_of(delivery_tag)) is not None:
                lease.done()

        def basic_reject(delivery_tag: str, requeue: bool = False) -> None:
            if (lease := self.receiver.lease_of(delivery_tag)) is not None:
                self._reject(lease, requeue)

        channel.basic_ack = basic_ack
        channel.basic_reject = basic_reject

    def _reject(self, lease: Lease, requeue: bool) -> None:
        """Settle the message of a plain Celery task as kombu 5.7 does.

        A message to be requeued is visible again after the length of a long poll. One that is
        rejected for good is deleted, or left to its queue's redrive policy.
        """
        if requeue:
            lease.defer(self._channel.wait_time_seconds)
        elif lease.queue.dlq_url is None and lease.queue.is_read:
            lease.done()
        else:
            lease.defer(lease.queue.visibility_timeout_seconds)

    def _lease_of_plain(self, request: Any) -> Lease | None:
        """Let a request of Celery's own class settle its lease, also if the message is lost."""
        lease = self.receiver.lease(request.message)
        if lease is not None:
            request.lease = lease
            lease.handed_to_pool = partial(was_handed_to_pool, request)
            request._on_ack = lambda logger, errors: lease.done()
            request._on_reject = lambda logger, errors, requeue: self._reject(lease, requeue)
            request.on_failure = _releasing(lease, request.on_failure)
        return lease

    def consumed(self) -> list[str]:
        """Return the names on SQS of the queues that this worker has received from."""
        return [poller.queue for poller in list(self._pollers.values())]

    def _note_started(self, request: Any) -> None:
        self._window.started(request.message.delivery_tag)
        if not isinstance(request, BackoffRequest) or request.lease is None:
            return
        self._keeper.events.emit(
            Started(
                queue=request.lease.queue.name,
                task=request.name,
                task_id=request.id,
                message_id=request.lease.delivery.message_id,
            )
        )

    def _note_started_tasks(self, consumer: Any) -> None:
        """Distinguish tasks handed to the pool from those that wait for an ETA or a rate limit."""
        handle: Callable[[Any], object] = consumer.on_task_request

        def on_task_request(request: Any) -> None:
            if getattr(request, "lease", None) is None and self._lease_of_plain(request) is None:
                _forget(request)  # its message was lost, or given back, a moment ago
                return

            def start() -> None:
                tag, lease = request.message.delivery_tag, request.lease
                self._inbox.put(Arrival("", {}, tag, lease, lambda: on_task_request(request)))

            is_kept_back = _may_start(request) and is_kept_back_at_start(request, start)
            if not _may_start(request):
                _forget(request)
            elif not is_kept_back:
                self._note_started(request)
                self._hand_over(handle, request)

        consumer.on_task_request = on_task_request
        upstream.start_nothing_given_back(consumer.controller, _may_start, self._hand_over)

    def _hand_over(self, handle: Callable[[Any], object], request: Any) -> bool:
        """Give a request to the pool; keep its message if that fails before the task has begun.

        Returns:
            Whether the pool has taken it.
        """
        try:
            handle(request)
            return True
        except Exception as exc:
            lease = request.lease
            if lease.state is not State.HELD or lease.handed_to_pool():
                raise
            what = f"the pool cannot take it ({type(exc).__name__})"
            self.receiver.keep(lease, {"task": request.name, "id": request.id}, what)
            _forget(request)
            return False


def name_among_workers(consumer: Any) -> str:
    """This worker's name in a store. On SQS nobody warns of a node name that is taken."""
    return f"{consumer.hostname} {os.getpid()} {_MARK}"


def _may_start(request: Any) -> bool:
    """Return whether this worker still holds the request's message."""
    return may_start(request.lease)


def _releasing(lease: Lease, on_failure: Callable[..., object]) -> Callable[..., None]:
    """Give a message back if Celery is done with its request and has not settled it.

    Celery leaves it to the broker after a cancelled run (a lost connection, with
    ``worker_cancel_long_running_tasks_on_connection_loss``) and after a ``MemoryError``.
    """

    @wraps(on_failure)
    def fail_and_release(*args: Any, **kwargs: Any) -> None:
        try:
            on_failure(*args, **kwargs)
        finally:
            lease.release()

    return fail_and_release


def _retry_for_of(task: Any) -> float | None:
    """Return the time budget of a task; ``None`` if it has none, or not our base class."""
    if not getattr(task, "is_covered", False):
        return None
    retry_for: float | None = task.backoff_options.retry_for
    return retry_for


def _forget(request: Any) -> None:
    """Celery keeps a request, and its message's body, until its task has ended."""
    if state.requests.get(request.id) is request:
        state.task_ready(request)


def _soon(hub: Any) -> Callable[[Callable[[], object]], object] | None:
    """Look ``call_soon`` up at each call: ``wake_event_loop`` replaces it at each (re)connect."""
    return None if hub is None else lambda callback: hub.call_soon(callback)


def _processes(consumer: Any) -> int:
    """Return how many tasks can run at once, counting processes that autoscale may add."""
    autoscaler = getattr(consumer.controller, "autoscaler", None)  # may be told other limits
    most = 0 if autoscaler is None else int(autoscaler.max_concurrency)
    return max(upstream.pool_size(consumer.pool), most)


def _blocks(pool: Any) -> bool:
    return any(is_pool_of(pool, name) for name in _BLOCKING_POOLS)


def _wait_seconds(channel: Any) -> int:
    """The length of a long poll: what the user has set, else SQS's longest."""
    seconds = channel.transport_options.get("wait_time_seconds", MAX_WAIT_TIME_SECONDS)
    return max(0, min(MAX_WAIT_TIME_SECONDS, int(seconds)))
