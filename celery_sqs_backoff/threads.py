"""Start daemon threads, and wait for calls no longer than some seconds."""

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
from typing import Generic, TypeVar

T = TypeVar("T")


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


def call_in_time(call: Callable[[], T], *, seconds: float) -> Future[T] | None:
    """Call in another thread, and wait for its end for at most ``seconds``.

    Returns:
        The call. It has ended, or goes on for as long as it takes: ``done()`` says which. ``None``
        if the machine has no thread left: nothing has been called.
    """
    future: Future[T] = Future()
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()
        if start_daemon("sqs-call", caller.run) is None:
            return None
    caller.begin(future, call)
    with suppress(NotInTime):
        future.exception(seconds)
    return future


class SharedCall(Generic[T]):
    """A call whose result many threads need, made once at a time.

    Each thread waits until the call has taken the given seconds since its start. So a call that
    hangs holds up the threads that began to wait with it, and no later one.

    Arguments:
        call: made in a thread of its own.
        clock: seconds, monotonic.
    """

    class TakesTooLong(Exception):
        """The call has taken its seconds already, or the machine has no thread left."""

    def __init__(self, call: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: Future[T] | None = None
        self._begun_at = 0.0

    def result(self, *, seconds: float) -> T:
        """Return the result of the call under way, or of a new one; raise what it raises.

        Raises:
            SharedCall.TakesTooLong: it has been under way for ``seconds``, and goes on; or the
                machine has no thread left, and nothing has been called.
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
    """A thread for one call after the other: to start one costs more CPU than the call to SQS."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def begin(self, future: Future[T], call: Callable[[], T]) -> None:
        """Make the call in this thread, which must be new or idle."""
        self._work.put(partial(_carry_out, future, call, self))

    def run(self) -> None:
        while True:
            self._work.get()()  # no name keeps the answer: it may be large


#: Those without work. A process's own: a fork has none of these threads.
_idle: deque[_Caller] = deque()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)


def _carry_out(future: Future[T], call: Callable[[], T], caller: _Caller) -> None:
    try:
        settle = partial(future.set_result, call())
    except BaseException as exc:  # noqa: BLE001  # raised again where the result is asked for
        settle = partial(future.set_exception, exc)
    try:
        _idle.append(caller)  # before its end is known: else who asks next makes one more
        settle()
    finally:
        del future, settle  # an exception's traceback has this frame
