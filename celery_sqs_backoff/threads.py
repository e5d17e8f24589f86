"""Start daemon threads, make calls with a time limit, and read a clock that never stops."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

#: While a machine is suspended, Linux stops CLOCK_MONOTONIC, but not CLOCK_BOOTTIME. On macOS
#: ``time.monotonic()`` stops, but CLOCK_MONOTONIC goes on.
#: https://docs.python.org/3/library/time.html#time.CLOCK_BOOTTIME
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_seconds() -> float:
    """Return the seconds of a clock that never goes back and never stops, even during a suspend."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def start_daemon(name: str, run: Callable[[], object]) -> threading.Thread | None:
    """Start a daemon thread. When the process ends, it does not wait for the thread.

    Returns:
        The thread. ``None`` if the machine allows no further thread, or the interpreter is ending.
        The caller may try again later.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def call_in_time(call: Callable[[], T], *, seconds: float) -> Future[T] | None:
    """Make a call in another thread, and wait at most ``seconds`` for its end.

    Returns:
        The future of the call. ``done()`` is false if the call is still under way. ``None`` if the
        call was not made, because the machine allows no further thread.
    """
    future: Future[T] = Future()
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()
        if start_daemon("sqs-call", caller.run) is None:
            return None
    caller.work.put((future, call))
    with suppress(NotInTime):
        future.exception(seconds)
    return future


class SharedCall(Generic[T]):
    """A function that several threads call, but that runs only once at a time.

    If the function is already running, a thread that calls it waits for the result of that run. The
    thread waits only until the run has lasted for the given seconds. So if the function hangs,
    threads that call it later do not wait.

    Arguments:
        call: the function. It runs in a thread of its own.
        clock: returns monotonic seconds.
    """

    class TakesTooLong(Exception):
        """The call did not end within the given seconds, or the machine allows no thread for it."""

    def __init__(self, call: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: Future[T] | None = None
        self._begun_at = 0.0

    def result(self, *, seconds: float) -> T:
        """Return the result of the call that is under way, or else of a new call.

        Raises:
            SharedCall.TakesTooLong: the call has been under way for ``seconds`` and has not ended,
                or the machine allows no thread for a new call.
            Exception: the error that the call raised.
        """
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = call_in_time(self._call, seconds=0)
                self._begun_at = self._clock()
            under_way, left = self._under_way, self._begun_at + seconds - self._clock()
        if under_way is not None:
            with suppress(NotInTime):
                under_way.exception(max(0.0, left))
            if under_way.done():
                return under_way.result()
        raise SharedCall.TakesTooLong


class _Caller:
    """A thread that makes one call after another.

    It is reused, because starting a thread costs more CPU than a call to SQS.
    """

    def __init__(self) -> None:
        #: Calls for this thread to make. Add a call only while the thread is new or idle.
        self.work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def run(self) -> None:
        while True:
            # Use no local variable. It would keep a large answer alive while the thread is idle.
            _carry_out(*self.work.get(), self)


#: Idle threads that wait for a call. A fork copies no threads, so the child empties the list.
_idle: deque[_Caller] = deque()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)


def _carry_out(future: Future[T], call: Callable[[], T], caller: _Caller) -> None:
    try:
        settle = partial(future.set_result, call())
    except BaseException as exc:  # noqa: BLE001  # ``result()`` raises it again
        settle = partial(future.set_exception, exc)
    try:
        # Append first, so that the thread that waits for the result can reuse this thread at once.
        _idle.append(caller)
        settle()
    finally:
        del future, settle  # avoids a cycle: the traceback of an exception refers to this frame
