"""When a queue has so many hidden messages that one more could stall it.

SQS allows 120,000 messages in flight per queue. At the quota a standard queue answers a short poll
with the error OverLimit, and a long poll with nothing at all: the worker would look idle, and
every task behind the outage would wait for it.
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-queues.html
"""

from __future__ import annotations

from collections.abc import Callable

from botocore.exceptions import BotoCoreError, ClientError
from celery.utils.log import get_logger

from ..limits import MAX_IN_FLIGHT_MESSAGES
from ..queues import error_code
from .lease import Lease

__all__ = ["InFlight"]

logger = get_logger(__name__)

#: Between two looks at one queue. The figure is approximate anyway.
_INTERVAL_SECONDS = 60.0


class InFlight:
    """How much of a queue's quota of messages in flight is used, asked of SQS when it matters.

    Arguments:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[str, tuple[float, float]] = {}
        self._denied: set[str] = set()

    def share(self, lease: Lease) -> float:
        """Return the share, 0 to 1, of the lease's queue; 0 if SQS does not say."""
        now = self._clock()
        read_at, share = self._shares.get(lease.queue.url, (-_INTERVAL_SECONDS, 0.0))
        if now - read_at >= _INTERVAL_SECONDS:
            share = self._ask(lease)
            self._shares[lease.queue.url] = (now, share)
        return share

    def _ask(self, lease: Lease) -> float:
        try:
            answer = lease.client.get_queue_attributes(
                QueueUrl=lease.queue.url, AttributeNames=["ApproximateNumberOfMessagesNotVisible"]
            )
            in_flight = answer["Attributes"]["ApproximateNumberOfMessagesNotVisible"]
            return int(in_flight) / MAX_IN_FLIGHT_MESSAGES
        except (ClientError, BotoCoreError, KeyError, ValueError) as exc:
            if lease.queue.url not in self._denied:
                self._denied.add(lease.queue.url)
                logger.warning(
                    "Cannot read how many messages of queue %s are in flight (%s): messages will"
                    " not be parked before SQS's quota is reached. This is said once per queue.",
                    lease.queue.name,
                    error_code(exc),
                )
            return 0.0
