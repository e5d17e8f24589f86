"""Bugs of Celery and kombu that stop a worker on SQS: one guard each, on the instances at hand.

Each says which versions it is for; on others it changes nothing that works.
"""

from __future__ import annotations

from .loop import call_beside_event_loop, keep_event_loop, wake_event_loop
from .pools import give_back_before_soft_shutdown, remember_running_tasks, run_after_receiving
from .receiving import (
    ORIGINAL_BODY,
    ask_for_attributes,
    declare_without_leave_to_look,
    survive_bodies_without_json,
    survive_failed_receives,
)

__all__ = [
    "ORIGINAL_BODY",
    "ask_for_attributes",
    "call_beside_event_loop",
    "declare_without_leave_to_look",
    "give_back_before_soft_shutdown",
    "keep_event_loop",
    "remember_running_tasks",
    "run_after_receiving",
    "survive_bodies_without_json",
    "survive_failed_receives",
    "wake_event_loop",
]
