"""Bugs of Celery and kombu that stop a worker on SQS: one guard each, on the instances at hand.

Each says which versions it is for; on others it changes nothing that works.
"""

from __future__ import annotations

from .loop import wake_event_loop
from .pools import (
    give_back_before_soft_shutdown,
    pool_size,
    remember_running_tasks,
    start_nothing_given_back,
)
from .receiving import declare_without_asking, receive_ourselves

__all__ = [
    "declare_without_asking",
    "give_back_before_soft_shutdown",
    "pool_size",
    "receive_ourselves",
    "remember_running_tasks",
    "start_nothing_given_back",
    "wake_event_loop",
]
