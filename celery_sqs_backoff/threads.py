"""Threads that a worker can do without for a while, and calls that it waits for but so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NotInTime", "call_in_time", "start_daemon"]

_Result = TypeVar("_Result")


class NotInTime(Exception):
    """A call has not ended in time, or could not be made.

    ``thread``: where it goes on. ``None``: the machine has no thread left, and nothing was called.
    """

    def __init__(self, thread: threading.Thread | None) -> None:
        super().__init__("no thread left" if thread is None else "no end in time")
        self.thread = thread


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


def call_in_time(name: str, call: Callable[[], _Result], seconds: float) -> _Result:
    """Call a function in a thread of its own, and wait for so many seconds at the most.

    No library can be relied on for its timeouts. What takes longer goes on in its thread.

    Raises:
        NotInTime: see there. Also if the function has raised what is no ``Exception``.
        Exception: whatever the function has raised.
    """
    results: list[_Result] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as exc:  # noqa: BLE001  # raised again by the caller, if it still waits
            failures.append(exc)

    thread = start_daemon(name, run)
    if thread is None:
        raise NotInTime(None)
    thread.join(seconds)
    if results:
        return results[0]
    if failures:
        raise failures[0]
    raise NotInTime(thread)
