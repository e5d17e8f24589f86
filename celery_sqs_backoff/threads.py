"""Threads that a worker can do without for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["start_daemon"]


def start_daemon(name: str, run: Callable[[], object]) -> threading.Thread | None:
    """Start a thread that its process does not wait for.

    Returns:
        ``None`` if the machine has no thread left, or the interpreter is ending. To be tried again.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread
