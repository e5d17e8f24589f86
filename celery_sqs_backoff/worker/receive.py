"""Receives for a worker: from each consumed queue to messages that Celery's loop may take."""

from __future__ import annotations

import os
import time
from functools import partial
from tempfile import gettempdir
from typing import Any, Final
from uuid import uuid4

from celery.utils.log import get_logger

from ..provider.gate import RECOVERY_LOOK_SECONDS
from ..sqs.clients import Clients
from ..sqs.delivery import Delivery
from ..sqs.eta import parse_eta
from ..sqs.limits import MAX_WAIT_TIME_SECONDS
from ..sqs.queues import Queue, read_queue
from ..text import BUG_CALLS, error_site
from . import unreadable, upstream
from .admission import Admission, Answer, held_seconds
from .foreign import Foreign
from .inbox import Inbox
from .keeper import Keeper
from .lease import Lease, State
from .payload import NotUnderstood, celery_payload
from .poller import Poller
from .providers import Gates, fleet_of
from .window import Window

logger = get_logger(__name__)

#: Of this process: in containers, each worker may be process 1.
_MARK: Final = uuid4().hex[:8]

#: Between two reads of a queue's attributes: as long as it could not be read, and afterwards.
_UNREAD_SECONDS = 2.0
_READ_SECONDS = 60.0


class Receiver:
    """Everything between SQS and Celery's consumer, for the life of a worker.

    Pollers call :meth:`take` in their threads. It makes a lease on each message, and puts those
    that may run into the inbox, which Celery's loop empties into :meth:`deliver`.

    Arguments:
        consumer: Celery's, which has no channel yet.
        keeper: renews and settles the leases.
    """

    def __init__(self, consumer: Any, keeper: Keeper) -> None:
        self.consumer = consumer
        self.keeper = keeper
        self.clients = Clients()
        # Not to be guessed: on a shared /tmp, no other user may tell our tasks of a loss.
        self.lost_flags = os.path.join(gettempdir(), f"celery-sqs-backoff-{uuid4().hex}")
        self.window = Window(
            processes=self._processes,
            multiplier=lambda: int(consumer.prefetch_multiplier),
            waiting_for=keeper.waiting_for,
        )
        self.inbox = Inbox(self)
        self.admission = Admission(consumer.hostname, self.inbox.put)
        self.gates = Gates(
            keeper,
            room=self._room,
            fleet=fleet_of(consumer.app, worker=name_among_workers(consumer)),
        )
        self._foreign = Foreign(consumer)
        self.channel: Any = None
        self._pollers: dict[str, Poller] = {}
        self._queues: dict[str, tuple[Queue, float]] = {}
        self._leases: dict[str, Lease] = {}  # by delivery tag, until they are settled

    def attach(self, channel: Any) -> None:
        """Deliver through this channel. Call it before the channel consumes."""
        self.channel = channel
        self.clients.attach(channel)
        self.inbox.clear()
        self.admission.is_open = True
        upstream.receive_ourselves(
            channel,
            on_consume=self._start,
            on_cancel=self._stop,
            drain_events=self.inbox.drain_events,
        )

    def pause(self) -> None:
        """Stop receiving, and give back messages that have not started or that still arrive."""
        self.admission.is_open = False
        for poller in self._pollers.values():
            poller.stop()
        self.inbox.clear()
        for lease in self.keeper.held():
            if not lease.handed_to_pool():
                lease.give_back()

    def consumed(self) -> list[str]:
        """Return the names on SQS of the queues that this worker has received from."""
        return [poller.queue for poller in list(self._pollers.values())]

    def _start(self, name: str) -> None:
        poller = self._pollers.get(name)
        if poller is None:
            url = self.channel._resolve_queue_url(name)
            wait_seconds = self.channel.transport_options.get("wait_time_seconds")
            poller = self._pollers[name] = Poller(
                self,
                name,
                url,
                wait_seconds=_bounded_wait(wait_seconds),
                pause_seconds=max(0.0, float(self.channel.connection.polling_interval or 0)),
            )
        poller.start()

    def _stop(self, name: str) -> None:
        if name in self._pollers:
            self._pollers[name].stop()

    def _processes(self) -> int:
        """Return how many tasks can run at a time, counting processes that autoscale may add."""
        autoscaler = getattr(self.consumer.controller, "autoscaler", None)  # its limits may change
        most = 0 if autoscaler is None else int(autoscaler.max_concurrency)
        return max(upstream.pool_size(self.consumer.pool), most)

    def _room(self) -> int:
        """Return how many messages to bring forward. Other workers run some, so it is a lot."""
        if not self.admission.is_open:  # the pool may be gone
            return 0
        return 2 * self.window.startable_within(RECOVERY_LOOK_SECONDS)

    # Queues

    def queue(self, url: str) -> Queue:
        """Return a queue's newest known attributes. Reads an unknown queue."""
        known = self._queues.get(url)
        return known[0] if known else self.read_queue(url)

    def read_queue(self, url: str) -> Queue:
        """Return a queue's attributes. Reads them again if that was long ago."""
        known = self._queues.get(url)
        if known is not None:
            queue, read_at = known
            fresh_for = _READ_SECONDS if queue.is_read else _UNREAD_SECONDS
            if self.keeper.clock() - read_at < fresh_for:
                return queue
        queue = read_queue(self.clients.settling(url), url, last=known[0] if known else None)
        # Its end counts: a call that hangs for longer would otherwise hold up each poll.
        self._queues[url] = (queue, self.keeper.clock())
        self.keeper.queue_read(queue)
        return queue

    # Messages, in the pollers' threads

    def take(
        self,
        poller: Poller,
        messages: list[dict[str, Any]],
        *,
        seconds_ago: float,
        hidden_seconds: int,
    ) -> None:
        """Hold the messages of one receive, and send each on its way.

        Arguments:
            poller: of their queue.
            messages: as ReceiveMessage returned them, in order.
            seconds_ago: how long ago SQS has handed them out, at least.
            hidden_seconds: the visibility timeout that was named.
        """
        queue = self.queue(poller.url)
        # One time for all messages: reading the first of them may take a while.
        seen_at, received_at = time.time() - seconds_ago, self.keeper.clock() - seconds_ago
        for message in messages:
            lease: Lease | None = None
            try:
                lease = self._hold(
                    message, poller.name, queue, seen_at, received_at, hidden_seconds
                )
                if self.admission.admit(lease, starts=False) is not Answer.KEEP_BACK:
                    self._prepare(lease)
            except Exception as exc:  # noqa: BLE001  # a bug, or the user's hub
                # Left to its visibility timeout; the rest of its batch is not.
                if lease is not None:
                    lease.lose()  # else it would be renewed, and take up its place, and never run
                logger.error(
                    "sqs_backoff.take_failed: a message on %s: %s",
                    *(poller.name, error_site(exc, calls=BUG_CALLS)),
                )
        self.keeper.carry_out_late()  # if this long poll has outlived the keeper's threads

    def _read(self, name: str, message: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Return the payload, or why it cannot be read."""
        why = "it is no Celery message"
        try:
            if (payload := celery_payload(message["Body"])) is not None:
                return payload, ""
        except NotUnderstood as exc:
            why = str(exc)
        try:
            return self._foreign.payload(name, message), why
        except NotUnderstood as exc:
            return None, str(exc)

    def _hold(
        self,
        message: dict[str, Any],
        name: str,
        queue: Queue,
        seen_at: float,
        received_at: float,
        hidden_seconds: int,
    ) -> Lease:
        payload, why = self._read(name, message)
        headers = payload["headers"] if payload else {}
        eta = headers.get("eta")
        task = self.consumer.app.tasks.get(headers.get("task"))
        tag, memory = message["ReceiptHandle"], self.keeper.memory
        lease = Lease(
            calls=self.clients.settling(queue.url),
            queue=queue,
            message=message,
            body=message["Body"],
            delivery=Delivery.from_sqs(
                message,
                queue_url=queue.url,
                received_at=seen_at,
                max_receive_count=queue.max_receive_count,
                retention_seconds=queue.retention_seconds,
                eta=None if eta is None else parse_eta(eta),
                held_seconds=held_seconds(queue),
                times_given_back=memory.times_given_back.get(message["MessageId"], 0),
                due_since=memory.due_since.get(message["MessageId"]),
                lost_flags=self.lost_flags,
            ),
            received_at=received_at,
            keeper=self.keeper,
            free=partial(self._free, tag),
            hidden_seconds=hidden_seconds,
            source=name,
            payload=payload,
            why=why,
            options=task.backoff_options if getattr(task, "is_covered", False) else None,
        )
        self.window.received(tag)
        self.keeper.hold(lease)
        return lease

    def _free(self, tag: str) -> None:
        self._leases.pop(tag, None)
        self.window.freed(tag)

    def _prepare(self, lease: Lease) -> None:
        """Complete the payload as kombu needs it, without a second copy of the body. Deliver it."""
        assert lease.payload is not None
        self._leases[lease.tag] = lease
        properties = lease.payload["properties"]
        properties["delivery_tag"] = lease.tag
        properties["delivery_info"] |= {
            "sqs_message": {key: value for key, value in lease.message.items() if key != "Body"},
            "sqs_queue": lease.queue.url,
        }
        if lease.state is not State.HELD:  # given back, or lost, a moment ago
            self._leases.pop(lease.tag, None)
        else:
            self.inbox.put(lease)

    def lease(self, tag: str) -> Lease | None:
        """Return the lease on a message that was delivered, until it is settled or lost."""
        return self._leases.get(tag)

    # In Celery's loop

    def deliver(self, lease: Lease) -> None:
        """Give a message to Celery, or let it go on where its provider made it wait.

        A message that Celery or kombu fails to take is hidden, unless its task is running.
        """
        if lease.state is not State.HELD:
            return  # it was given back, or lost, while it waited
        try:
            connection = self.channel.connection
            if lease.go_on is not None:
                lease.go_on()
            elif lease.source not in connection._callbacks:
                # Its queue has been cancelled ("cancel_consumer"). kombu would reject it
                # on whatever channel it finds first, which need not be ours.
                lease.give_back()
            else:
                connection._deliver(lease.payload, lease.source)
                # The lease alone settles it, so kombu need not hold, or restore, it.
                self.channel.qos.ack(lease.tag)
        except Exception as exc:  # noqa: BLE001  # whatever is wrong with it, others are waiting
            if not lease.is_settled() and not lease.handed_to_pool():
                what = f"its headers or its body cannot be used ({type(exc).__name__})"
                unreadable.keep(lease, {}, what, worker=self.consumer.hostname)
        if lease.state is State.HELD and not lease.keeps_place:
            self.window.blocked(lease.tag)


def name_among_workers(consumer: Any) -> str:
    """Return this worker's name in a store. SQS does not warn of a node name that is taken."""
    return f"{consumer.hostname} {os.getpid()} {_MARK}"


def _bounded_wait(seconds: object) -> int:
    """Return the length of a long poll, by default SQS's longest."""
    if not isinstance(seconds, int | float | str):
        return MAX_WAIT_TIME_SECONDS
    return max(0, min(MAX_WAIT_TIME_SECONDS, int(seconds)))
