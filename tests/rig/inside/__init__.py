"""Tests that know the worker's inside: arithmetic, parsers, and guards against bugs upstream.

They call private functions with values that no queue would bring in a reasonable time. When the
worker is written anew they change with it, or go. All other tests of the worker use the rig.
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
    """Return the window of a worker whose pool has some processes."""
    consumer = SimpleNamespace(
        pool=SimpleNamespace(num_processes=processes),
        prefetch_multiplier=multiplier,
        controller=None,
    )
    keeper: Any = SimpleNamespace(waiting_for=waiting_for, clock=clock)
    return Window(consumer, keeper)


def a_lease(tag: str, **facts: Any) -> Any:
    """Return a lease on a message, as far as the window and the inbox need it."""
    return SimpleNamespace(tag=tag, **facts)
