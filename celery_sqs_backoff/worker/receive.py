"""Makes a lease on each received message, and puts messages that may run into Celery's inbox.

A lease (:class:`.Lease`) is one received message that the worker holds. The worker extends the
message's visibility timeout until the message is settled: deleted, hidden, given back, or sent to
the dead-letter queue. To give a message back is to let SQS show it again without counting an
attempt.
"""

from __future__ import annotations

import os
import time
from tempfile import gettempdir
from typing import Any, Final
from uuid import uuid4

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..provider.gate import RECOVERY_LOOK_SECONDS
from ..sqs.clients import Clients
from ..sqs.delivery import Delivery, parse_eta
from ..sqs.limits import MAX_WAIT_TIME_SECONDS
from ..sqs.queues import Queue, read_queue
from ..text import BUG_CALLS, error_site
from . import upstream
from .admission import Admission, held_seconds
from .inbox import Inbox
from .keeper import Keeper
from .lease import Lease
from .payload import NotUnderstood, Payloads
from .poller import Poller
from .providers import Gates
from .window import Window

logger = get_logger(__name__)

#: A part of this worker's name in a store. Two workers in containers may have the same node name
#: and the same PID, because the first process of each container has the PID 1.
_MARK: Final = uuid4().hex[:8]

#: Seconds after which the worker reads a queue's attributes again, if they are not known yet.
_UNREAD_SECONDS = 2.0
#: Seconds after which the worker reads a queue's attributes again, if they are known.
_READ_SECONDS = 60.0


class Receiver:
    """Connects SQS with Celery's consumer, for the life of a worker.

    Each queue has a poller. The poller receives messages in its own threads, and passes them to
    :meth:`take`.

    Arguments:
        consumer: Celery's consumer, which has no channel yet.
        keeper: makes the calls to SQS that extend, hide or delete messages.
    """

    def __init__(self, consumer: Any, keeper: Keeper) -> None:
        self.consumer = consumer
        self.keeper = keeper
        self.clients = Clients()
        # The directory of files that tell running tasks that the worker has lost their messages.
        # The directory's name is random, so that no other user of a shared /tmp can make it first.
        self.lost_flags = os.path.join(gettempdir(), f"celery-sqs-backoff-{uuid4().hex}")
        self.window = Window(consumer, keeper)
        self.inbox = Inbox(consumer, self.window, keeper.pulse)
        self.admission = Admission(consumer.hostname, self.inbox)
        self.gates = Gates(
            keeper,
            room=self._room,
            app=consumer.app,
            worker=name_among_workers(consumer),
        )
        self._payloads = Payloads(consumer)
        self._pollers: dict[str, Poller] = {}
        self._queues: dict[str, tuple[Queue, float]] = {}

    def attach(self, channel: Any) -> None:
        """Deliver messages to Celery through a kombu channel that has not begun to consume."""
        self.clients.attach(channel)
        self.inbox.channel = channel
        self.inbox.clear()
        self.admission.is_open = True
        upstream.receive_ourselves(
            channel,
            on_consume=self._start,
            on_cancel=self._stop,
            drain_events=self.inbox.drain_events,
        )

    def pause(self) -> None:
        """Stop receiving. Give back the messages of tasks that have not started.

        SQS then shows them to other workers. Messages that still arrive are given back, too.
        """
        self.admission.is_open = False
        for poller in self._pollers.values():
            poller.stop()
        self.inbox.clear()
        for lease in self.keeper.held():
            if not lease.handed_to_pool():
                lease.give_back()

    def consumed(self) -> list[str]:
        """Return the names on SQS of the queues that this worker has received from."""
        return [poller.queue_name for poller in list(self._pollers.values())]

    def _start(self, name: str) -> None:
        poller = self._pollers.get(name)
        if poller is None:
            channel = self.inbox.channel
            poller = self._pollers[name] = Poller(
                self,
                name,
                channel._resolve_queue_url(name),
                wait_seconds=_bounded_wait(channel.transport_options.get("wait_time_seconds")),
                pause_seconds=max(0.0, float(channel.connection.polling_interval or 0)),
            )
        poller.start()

    def _stop(self, name: str) -> None:
        if name in self._pollers:
            self._pollers[name].stop()

    def _room(self) -> int:
        """Return how many hidden messages SQS should show early, so that this worker runs them.

        These messages are hidden because of their providers. Return twice the number of messages
        that could start here soon, because other workers receive some of the shown messages.
        """
        if not self.admission.is_open:  # while the worker stops, its pool may be gone
            return 0
        return 2 * self.window.startable_within(RECOVERY_LOOK_SECONDS)

    def read_queue(self, url: str) -> Queue:
        """Return a queue's attributes. Ask SQS for them if the last answer is over a minute old.

        If no read has succeeded yet, ask SQS again after two seconds.
        """
        known = self._queues.get(url)
        if known is not None:
            queue, read_at = known
            fresh_for = _READ_SECONDS if queue.is_read else _UNREAD_SECONDS
            if self.keeper.clock() - read_at < fresh_for:
                return queue
        last, now = known[0] if known else None, self.keeper.clock()
        queue = read_queue(self.clients.settling(url), url, now=now, last=last)
        # Note the time after the read, not before it. Else the answer of a read that takes seconds
        # would be too old at once, and each poll would read again.
        self._queues[url] = (queue, self.keeper.clock())
        self.keeper.queue_read(queue)
        return queue

    # Messages, in the pollers' threads

    def take(
        self,
        name: str,
        queue: Queue,
        messages: list[dict[str, Any]],
        *,
        seconds_ago: float,
        hidden_seconds: int,
    ) -> None:
        """Make a lease on each message of a response. Put into the inbox the messages that may run.

        Arguments:
            name: the queue's name in Celery.
            queue: the queue's attributes.
            messages: as ReceiveMessage returned them, in order.
            seconds_ago: SQS sent the response at least this many seconds ago.
            hidden_seconds: the visibility timeout that the receive call asked for.
        """
        # Take the time once, because all messages arrived together. Parsing the first of them may
        # take a while.
        seen_at, received_at = time.time() - seconds_ago, self.keeper.clock() - seconds_ago
        for message in messages:
            lease: Lease | None = None
            try:
                lease = self._make_lease(name, queue, message, seen_at, received_at, hidden_seconds)
                self.window.received(lease)
                self.keeper.hold(lease)
                if self.admission.admit(lease, starts=False):
                    self.inbox.put(lease)
            except Exception as exc:  # noqa: BLE001  # a bug, or the event loop refused a callback
                # Go on, because the other messages need leases, too. This message comes back when
                # its visibility timeout ends.
                if lease is not None:
                    lease.lose()  # else the worker would hold it for ever, and never run it
                logger.error(
                    "sqs_backoff.take_failed: a message on %s: %s",
                    *(name, error_site(exc, calls=BUG_CALLS)),
                )
        self.keeper.carry_out_late()  # during a stop, the keeper's thread may have ended

    def _make_lease(
        self,
        name: str,
        queue: Queue,
        message: dict[str, Any],
        seen_at: float,
        received_at: float,
        hidden_seconds: int,
    ) -> Lease:
        """Return a lease on a message, with the payload (a dict with the task) that kombu needs.

        The payload includes the SQS message, but without its body, to save memory.
        """
        payload, headers, why = None, {}, ""
        try:
            payload = self._payloads.read(name, message)
        except NotUnderstood as exc:
            why = str(exc)
        if payload:
            headers = payload["headers"]
            payload["properties"]["delivery_tag"] = message["ReceiptHandle"]
            payload["properties"]["delivery_info"] |= {
                "sqs_message": {key: value for key, value in message.items() if key != "Body"},
                "sqs_queue": queue.url,
            }
        task = self.consumer.app.tasks.get(headers.get("task"))
        message_id, memory = message["MessageId"], self.keeper.memory
        return Lease(
            calls=self.clients.settling(queue.url),
            queue=queue,
            message=message,
            body=message["Body"],
            delivery=Delivery.from_sqs(
                message,
                queue_url=queue.url,
                queue=name,
                received_at=seen_at,
                max_receive_count=queue.max_receive_count,
                retention_seconds=queue.retention_seconds,
                eta=parse_eta(headers.get("eta")),
                held_seconds=held_seconds(queue),
                times_given_back=memory.times_given_back.get(message_id, 0),
                due_since=memory.due_since.get(message_id),
                lost_flags=self.lost_flags,
            ),
            received_at=received_at,
            keeper=self.keeper,
            hidden_seconds=hidden_seconds,
            source=name,
            payload=payload,
            why=why,
            options=task.backoff_options if getattr(task, "is_covered", False) else None,
        )


def name_among_workers(consumer: Any) -> str:
    """Return this worker's unique name in a store. Several workers may have one node name."""
    return f"{consumer.hostname} {os.getpid()} {_MARK}"


def _bounded_wait(seconds: Any) -> int:
    """Return the setting ``wait_time_seconds`` in seconds, limited to 0 to 20. Default 20.

    Raises:
        ImproperlyConfigured: the setting is not a number.
    """
    if seconds is None:
        return MAX_WAIT_TIME_SECONDS
    try:
        return int(max(0.0, min(MAX_WAIT_TIME_SECONDS, float(seconds))))
    except (TypeError, ValueError):
        raise ImproperlyConfigured(
            f"invalid wait_time_seconds {seconds!r}: expected a number from 0 to 20"
        ) from None
