"""How many tasks this worker runs now, by Celery's own account: without the base class too."""

from __future__ import annotations

from typing import Any, Final

from celery.worker import state

from ..sqs.queues import queue_name

#: Celery's loop may change the set while another thread copies it, which takes microseconds.
_TRIES: Final = 100


def running(queue: str) -> int:
    """Return how many tasks of a queue a process, thread or greenlet of the pool has begun.

    Not those that wait for one. Those whose message was lost are running until they end.

    Args:
        queue: its name on SQS.
    """
    return sum(_queue_of(request) == queue for request in active_requests())


def active_requests() -> list[Any]:
    """Return Celery's requests that a process, thread or greenlet of the pool has begun."""
    for _ in range(_TRIES):
        try:
            return list(state.active_requests)
        except RuntimeError:  # "Set changed size during iteration"
            continue
    return []


def _queue_of(request: Any) -> str:
    info = request.message.delivery_info
    return queue_name(info.get("sqs_queue", ""))
