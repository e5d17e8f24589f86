"""From a kombu message to a lease on the SQS message behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..delivery import Delivery
from ..eta import parse_eta
from ..queues import Queue, read_queue, settling_client
from .groups import MessageGroups
from .keeper import Keeper
from .lease import Lease
from .lost import LostFlags
from .upstream import ORIGINAL_BODY

__all__ = ["WANTED_ATTRIBUTES", "Receiver", "held_seconds"]

#: What every ReceiveMessage asks for beside the body.
WANTED_ATTRIBUTES = {
    "MessageSystemAttributeNames": [
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
        "MessageDeduplicationId",
        "MessageGroupId",
        "SentTimestamp",
    ],
    "MessageAttributeNames": ["All"],
}


#: Between two tries to read the attributes of a queue.
_READ_AGAIN_SECONDS = 2.0


class Receiver:
    """Makes leases, and knows the queues they are from. One per worker.

    Arguments:
        keeper: who renews and settles the leases.
        soon: runs a callable in the worker's event loop, from any thread.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        soon: Callable[[Callable[[], object]], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.keeper = keeper
        self._groups = MessageGroups(soon)
        self.lost_flags = LostFlags()
        self._now = now
        self._queues: dict[str, Queue] = {}
        self._read_again_at = 0.0
        self._clients: dict[str, tuple[Any, Any]] = {}

    def queue(self, url: str, kombu_client: Any) -> Queue:
        """Return the queue's attributes, read once; if that fails, again a little later."""
        queue, now = self._queues.get(url), self.keeper.clock()
        if queue is None or (not queue.is_read and now >= self._read_again_at):
            queue = self._queues[url] = read_queue(self._client(url, kombu_client), url)
            self._read_again_at = now + _READ_AGAIN_SECONDS
        return queue

    def lease(self, message: Any) -> Lease | None:
        """Hold a message; ``None`` if it is not from SQS. The same message has one lease."""
        if (lease := getattr(message, "sqs_lease", None)) is not None:
            return lease  # type: ignore[no-any-return]
        info = message.delivery_info
        try:
            sqs_message, url = info["sqs_message"], info["sqs_queue"]
        except (KeyError, TypeError):
            return None
        channel, tag = message.channel, message.delivery_tag
        kombu_client = _kombu_client(channel, url)
        queue = self.queue(url, kombu_client)
        lease = Lease(
            client=self._client(url, kombu_client),
            queue=queue,
            message=sqs_message,
            body=sqs_message.get(ORIGINAL_BODY, sqs_message["Body"]),
            delivery=Delivery.from_sqs(
                sqs_message,
                queue_url=url,
                received_at=self._now(),
                max_receive_count=queue.max_receive_count,
                retention_seconds=queue.retention_seconds,
                eta=parse_eta((message.headers or {}).get("eta")),
                held_seconds=held_seconds(queue),
                unrun=self.keeper.memory.unrun(sqs_message["MessageId"]),
                lost_flag=self.lost_flags.path,
            ),
            received_at=self.keeper.clock(),
            keeper=self.keeper,
            # Not message.ack(): it deletes. Not message.reject(): it deletes, or hides.
            free=lambda: channel.qos.ack(tag),
        )
        message.sqs_lease = lease
        self.keeper.hold(lease)
        return lease

    def in_turn(self, lease: Lease, start: Callable[[], object]) -> None:
        """Call ``start`` now; on a FIFO queue, when the lease's message group allows."""
        if lease.queue.is_fifo:
            self._groups.take_turn(lease, start)
        else:
            start()

    def _client(self, url: str, kombu_client: Any) -> Any:
        """A client of ours with the credentials of kombu's, which changes when STS ones expire."""
        source, client = self._clients.get(url, (None, None))
        if source is not kombu_client:
            client = settling_client(kombu_client)
            self._clients[url] = (kombu_client, client)
        return client


def held_seconds(queue: Queue) -> float:
    """How long a worker holds a task that is not due rather than give it back to SQS."""
    return queue.visibility_timeout_seconds / 2


def _kombu_client(channel: Any, url: str) -> Any:
    """kombu's client for a queue's URL. (Its routing key need not be the queue's name.)"""
    for name, queue in channel.predefined_queues.items():
        if queue["url"] == url:
            return channel.sqs(queue=name)
    return channel.sqs()
