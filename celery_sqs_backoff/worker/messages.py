"""From a received SQS message to a lease on it, and to what Celery's consumer gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from ..provider.gate import RECOVERY_LOOK_SECONDS
from ..sqs.clients import Clients
from ..sqs.delivery import Delivery
from ..sqs.eta import parse_eta
from ..sqs.queues import Queue, read_queue
from ..sqs.visibility import visibility_delay
from ..text import BUG_CALLS, error_site
from .foreign import IGNORED, Foreign
from .gates import Gates
from .inbox import Arrival
from .keeper import Keeper
from .lease import Lease
from .lost import LostFlags
from .payload import NotUnderstood, celery_payload
from .window import Window

logger = get_logger(__name__)

#: Between two reads of a queue's attributes: as long as it could not be read, and afterwards.
_UNREAD_SECONDS = 2.0
_READ_SECONDS = 60.0

#: A task that is due within this time is held here. A later one goes back to SQS, because messages
#: that are held use up the 100 places for those that wait.
_LONGEST_HELD_SECONDS = 15.0


@dataclass(frozen=True)
class _Receive:
    """What is common to the messages of one receive; as for :meth:`Receiver.take`."""

    name: str
    url: str
    #: Seconds since the epoch, and by the keeper's clock. One time for all messages: reading the
    #: first of them may take a while.
    seen_at: float
    received_at: float
    hidden_seconds: int | None


class Receiver:
    """Makes leases, and knows the queues they are from. One per worker; safe in any thread.

    Arguments:
        keeper: who renews and settles the leases.
        clients: for the queues.
        window: counts what is held.
        foreign: makes tasks of messages that Celery has not sent.
        retry_for: from a task's name to its time budget in seconds; ``None``: it has none.
        gates: of the tasks' providers, once the room for messages is known; ``None``: made here.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        clients: Clients,
        window: Window,
        foreign: Foreign,
        retry_for: Callable[[str], float | None] = lambda name: None,
        gates: Callable[[Callable[[], int]], Gates] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.keeper = keeper
        self.clients = clients
        self.lost_flags = LostFlags()
        #: Where messages go that can be delivered; and those that no task can be made of.
        self.deliver: Callable[[Arrival], object] = lambda arrival: None
        self.keep: Callable[[Lease, Mapping[str, Any], str], object] = lambda *about: None
        self._window = window
        make = gates or (lambda room: Gates(keeper, calls=clients.settling, room=room))
        self.gates = make(self._room)
        self._foreign = foreign
        self._retry_for = retry_for
        self._now = now
        self._lock = threading.Lock()
        self._queues: dict[str, tuple[Queue, float]] = {}
        self._leases: dict[str, Lease] = {}
        self._is_open = True

    def _room(self) -> int:
        """Messages to bring forward at once: more than we run, for other workers run them too."""
        if not self._is_open:  # the pool may be gone
            return 0
        return 2 * self._window.startable_within(RECOVERY_LOOK_SECONDS)

    # Queues

    def queue(self, url: str) -> Queue:
        """Return what was last read of a queue; read it, if it never was."""
        known = self._queues.get(url)
        return known[0] if known else self.read_queue(url)

    def read_queue(self, url: str) -> Queue:
        """Return a queue's attributes; read them again if that was long ago."""
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

    # Messages

    def open(self) -> None:
        """Take messages on from now on."""
        self._is_open = True

    def close(self) -> None:
        """Give back from now on whatever is still received."""
        self._is_open = False

    def take(
        self,
        name: str,
        url: str,
        messages: list[dict[str, Any]],
        *,
        seconds_ago: float = 0.0,
        hidden_seconds: int | None = None,
    ) -> None:
        """Hold the messages of one receive, and send each on its way. In the poller's thread.

        Arguments:
            name: of the queue, in Celery.
            url: of the queue.
            messages: as ReceiveMessage returned them, in order.
            seconds_ago: how long ago SQS has handed them out, at least.
            hidden_seconds: the visibility timeout that was named; ``None``: the queue's own.
        """
        seen_at, received_at = self._now() - seconds_ago, self.keeper.clock() - seconds_ago
        receive = _Receive(name, url, seen_at, received_at, hidden_seconds)
        for message in messages:
            try:
                self._take(receive, message)
            except Exception as exc:  # noqa: BLE001
                # Left to its visibility timeout; the others of its batch are not.
                logger.error(
                    "sqs_backoff.take_failed: a message on %s: %s",
                    *(name, error_site(exc, calls=BUG_CALLS)),
                )

    def _take(self, receive: _Receive, message: dict[str, Any]) -> None:
        name, url = receive.name, receive.url
        payload, why = self._read(name, message)
        headers: Mapping[str, Any] = (payload or {}).get("headers", {})
        task = headers.get("task")
        lease = self._hold(receive, message, headers)
        retry_for = self._retry_for(task) if isinstance(task, str) else None
        if retry_for is not None:
            lease.retry_for = retry_for
            lease.gives_up_at = lease.delivery.first_due_at + retry_for
        try:
            self._send_on(name, url, message, payload, why, lease)
        except Exception:  # a bug, or the user's hub: it is raised again, whatever it is
            lease.lose()  # else it would be renewed, and take up its place, with nobody to run it
            raise

    def _send_on(
        self,
        name: str,
        url: str,
        message: dict[str, Any],
        payload: dict[str, Any] | None,
        why: str,
        lease: Lease,
    ) -> None:
        if not self._is_open:
            lease.give_back()
        elif self.keeper.recognise(lease):
            pass  # this worker has the message in hand, or is done with it
        elif payload is IGNORED:
            logger.info("sqs_backoff.ignored: message %s on %s", lease.delivery.message_id, name)
            lease.done()
        elif payload is None:
            self.keep(lease, {}, why)
        elif not _goes_back_until_due(lease, payload["headers"]):
            self._arrive(name, url, message, payload, lease)

    def _read(self, name: str, message: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The payload, or why there is none."""
        why = "it is no Celery message"
        try:
            if (payload := celery_payload(message["Body"])) is not None:
                return payload, ""
        except NotUnderstood as exc:
            why = str(exc)
        try:
            payload = self._foreign.payload(name, message)
        except NotUnderstood as exc:
            return None, str(exc)
        return payload, "" if payload else why

    def _hold(
        self, receive: _Receive, message: dict[str, Any], headers: Mapping[str, Any]
    ) -> Lease:
        queue, tag = self.queue(receive.url), message["ReceiptHandle"]
        lease = Lease(
            calls=self.clients.settling(receive.url),
            queue=queue,
            message=message,
            body=message["Body"],
            delivery=Delivery.from_sqs(
                message,
                queue_url=receive.url,
                received_at=receive.seen_at,
                max_receive_count=queue.max_receive_count,
                retention_seconds=queue.retention_seconds,
                eta=parse_eta(headers.get("eta")),
                held_seconds=held_seconds(queue),
                times_given_back=self.keeper.memory.times_given_back(message["MessageId"]),
                due_since=self.keeper.memory.due_since(message["MessageId"]),
                lost_flag=self.lost_flags.path,
            ),
            received_at=receive.received_at,
            keeper=self.keeper,
            free=lambda: self._free(tag),
            hidden_seconds=receive.hidden_seconds,
        )
        self._window.received(tag)
        self.keeper.hold(lease)
        return lease

    def _free(self, tag: str) -> None:
        with self._lock:
            self._leases.pop(tag, None)
        self._window.freed(tag)

    def _arrive(
        self,
        name: str,
        url: str,
        message: dict[str, Any],
        payload: dict[str, Any],
        lease: Lease,
    ) -> None:
        tag = message["ReceiptHandle"]
        with self._lock:
            self._leases[tag] = lease
        message = {key: value for key, value in message.items() if key != "Body"}
        properties = payload["properties"]
        properties["delivery_tag"] = tag
        properties["delivery_info"] |= {"sqs_message": message, "sqs_queue": url}
        self.deliver(Arrival(name, payload, tag, lease))

    def lease(self, message: Any) -> Lease | None:
        """Return the lease on a kombu message; ``None`` if it is settled or lost."""
        lease = getattr(message, "sqs_lease", None)
        if not isinstance(lease, Lease):
            with self._lock:
                lease = self._leases.get(message.delivery_tag)
            if lease is not None:
                message.sqs_lease = lease
        return lease

    def lease_of(self, tag: str) -> Lease | None:
        """Return the lease on a delivered message that is not settled."""
        with self._lock:
            return self._leases.get(tag)


def held_seconds(queue: Queue) -> float:
    """How long a worker holds a task that is not due rather than give it back to SQS."""
    return min(_LONGEST_HELD_SECONDS, queue.visibility_timeout_seconds / 2)


def _goes_back_until_due(lease: Lease, headers: Mapping[str, Any]) -> bool:
    """Give a message back to SQS until its task is due, or a hop on the way there.

    Not if it has expired or is revoked: Celery sees to that first. Not on the last receive that the
    queue allows: the next one would move the message to the dead-letter queue.
    """
    now = time.time()
    eta, expires = parse_eta(headers.get("eta")), parse_eta(headers.get("expires"))
    if (
        eta is None
        or eta <= now
        or (expires is not None and expires <= now)
        or headers.get("id") in state.revoked
        or lease.delivery.is_last_before_sqs_moves_it
    ):
        return False
    seconds = visibility_delay(eta - now, lease.delivery, now=now)
    return seconds > held_seconds(lease.queue) and lease.defer(seconds)
