"""Guards of how messages are received: kombu only delivers them, and never asks SQS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger

logger = get_logger(__name__)


def declare_without_asking(consumer: Any) -> None:
    """Let a worker start that may not read its queues' attributes, and start faster.

    All versions: kombu asks how long a queue is when it declares it (``Channel._size``), with a
    client of its own per predefined queue, and does nothing with the answer. An AccessDenied there
    ends the worker.
    """
    connect = consumer.connect

    def connect_and_guard() -> Any:
        connection = connect()
        connection.default_channel._size = lambda queue: 0
        return connection

    consumer.connect = connect_and_guard


def receive_ourselves(
    channel: Any,
    *,
    on_consume: Callable[[str], object],
    on_cancel: Callable[[str], object],
    drain_events: Callable[[], object],
) -> None:
    """Keep kombu from polling, and hear which queues Celery consumes.

    All versions. A 4xx (expired credentials, kombu#2031) raises a bare ``Exception`` in the event
    loop and ends the worker; kombu 5.7.0: so does a 5xx or a timeout. kombu 5.5: the HTTP client
    blocks the event loop (kombu#2258), and a body that is no JSON ends the worker (kombu#2421).
    Quiet queues hold kombu's ten connections for the length of their long polls. After a lost
    connection kombu 5.7.0 finds no event loop and polls no more (kombu#2404).

    Arguments:
        channel: kombu's channel, before it consumes.
        on_consume: called with the name of each queue that Celery starts to consume.
        on_cancel: called with the name of each queue that it stops consuming.
        drain_events: what to do instead where Celery has no event loop.
    """
    consume, cancel = channel.basic_consume, channel.basic_cancel

    def basic_consume(queue: str, no_ack: bool = False, *args: Any, **kwargs: Any) -> Any:
        # kombu deletes what needs no acknowledgement when it polls, which it never does.
        result = consume(queue, False, *args, **kwargs)
        on_consume(queue)
        return result

    def basic_cancel(consumer_tag: str) -> Any:
        queue = channel._tag_to_queue.get(consumer_tag)
        result = cancel(consumer_tag)
        if queue is not None:
            on_cancel(queue)
        return result

    channel.basic_consume = basic_consume
    channel.basic_cancel = basic_cancel
    channel._schedule_queue = lambda queue: None
    channel.drain_events = lambda *args, **kwargs: drain_events()
