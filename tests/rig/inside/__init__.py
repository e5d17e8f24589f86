"""Tests of the worker's private functions: arithmetic, parsers, and guards against Celery's bugs.

They use values and races that a test on the rig could not produce in a reasonable time. If somebody
rewrites the worker, these tests change with it. All other tests of the worker use the rig.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery_sqs_backoff.worker.window import Window


def a_window(
    processes: int = 2,
    multiplier: int = 4,
    *,
    waiting_for: Callable[[str], int] = lambda url: 0,
    clock: Callable[[], float] = time.monotonic,
) -> Window:
    """Return the prefetch window of a worker, which decides how many messages it may hold."""
    consumer = SimpleNamespace(
        pool=SimpleNamespace(num_processes=processes),
        prefetch_multiplier=multiplier,
        controller=None,
    )
    keeper: Any = SimpleNamespace(waiting_for=waiting_for, clock=clock)
    return Window(consumer, keeper)


def a_lease(tag: str, **facts: Any) -> Any:
    """Return a stand-in for a lease, with the attributes that the window and the inbox use."""
    return SimpleNamespace(tag=tag, **facts)
