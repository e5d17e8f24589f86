"""A pool process that is told to end while it counts a chord's part reports the run, and ends then.

Timeline of a run that is part of a chord, on prefork::

    run  |  result stored  |  part counted; the last one sends the body  |  reported  |  idle
         TERM: runs again  |            TERM: not before the report      |  TERM: ends

If the next run is about to begin by then, the process ends before that.

All versions: billiard makes a SystemExit of the signal; seen where a supervisor signals the whole
process group. During the count that loses the body of the chord. After it the part, which is not
reported, runs again: backends that count by a number, and Redis before Celery 5.7, count it twice,
so the chord fails, or its body misses the result of another part.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from billiard.common import TERM_SIGNAL

from ..threads import start_daemon

#: Time to report to the main process that a run is over; it takes milliseconds.
_REPORT_SECONDS: Final = 0.5

#: A count that takes longer hangs, and is no reason to go on.
_LONGEST_COUNT_SECONDS: Final = 10.0


@contextmanager
def report_before_the_end() -> Iterator[None]:
    """Let no SIGTERM end a pool process in the block, nor before what follows it is reported."""
    late_end = _late_end()
    if late_end is None:
        yield
        return
    late_end.may_end_at = time.monotonic() + _LONGEST_COUNT_SECONDS
    try:
        yield
    finally:
        late_end.may_end_at = time.monotonic() + _REPORT_SECONDS


def end_if_told() -> None:
    """End this process if it has been told to: what begins now would be cut off midway."""
    if _LateEnd.waiting is not None:
        _LateEnd.waiting.end()


class _LateEnd:
    """A handler of the signal that calls billiard's once the process may end.

    Arguments:
        end: billiard's.
    """

    #: This process's, once it has been told to end, and until it does.
    waiting: ClassVar[_LateEnd | None] = None

    def __init__(self, end: Callable[[int, Any], object]) -> None:
        self._end = end
        #: By the monotonic clock.
        self.may_end_at = -math.inf

    def __call__(self, number: int, frame: Any) -> None:
        if time.monotonic() >= self.may_end_at:
            self.end()
        elif _LateEnd.waiting is None:
            _LateEnd.waiting = self
            if start_daemon("sqs-end", self._signal_again) is None:
                self.end()

    def end(self) -> None:
        _LateEnd.waiting = None
        self._end(TERM_SIGNAL, None)

    def _signal_again(self) -> None:
        while _LateEnd.waiting is self:  # a signal would cut the end itself short
            seconds = self.may_end_at - time.monotonic()
            if seconds <= 0:
                os.kill(os.getpid(), TERM_SIGNAL)
                seconds = _REPORT_SECONDS
            time.sleep(min(seconds, _REPORT_SECONDS))


def _late_end() -> _LateEnd | None:
    """This process's handler; ``None`` where it is not one of the prefork pool's."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(TERM_SIGNAL)
    if isinstance(handler, _LateEnd):
        return handler
    if getattr(handler, "__module__", None) != "billiard.common" or not callable(handler):
        return None
    late_end = _LateEnd(handler)
    signal.signal(TERM_SIGNAL, late_end)
    return late_end
