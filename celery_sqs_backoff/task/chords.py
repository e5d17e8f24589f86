"""A chord's part is counted once, and the last one sends the body, although its process is to end.

Timeline of a run that is part of a chord, on prefork::

    run  |  result stored  |  part counted; the last one sends the body  |  reported  |  idle
         TERM: runs again  |            TERM: not before the report      |  TERM: ends
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from billiard.common import TERM_SIGNAL

from ..threads import start_daemon

__all__ = ["count_parts_whole"]

#: Time to report to the main process that a run is over; it takes milliseconds.
_REPORT_SECONDS: Final = 0.5

#: A count that takes longer hangs, and is no reason to go on.
_LONGEST_COUNT_SECONDS: Final = 10.0


def count_parts_whole(backend: Any) -> None:
    """Let no SIGTERM end a pool process from its count of a chord's part to its report of the run.

    All versions: billiard makes a SystemExit of the signal. The Redis backend, which sends the body
    of a complete chord, notes in a ``finally`` that it is sent: such a chord never ends. And a part
    that is counted, but not reported, runs again: backends that count by a number, and Redis before
    Celery 5.7, count it twice, so the chord fails, or its body misses the result of another part.
    Seen where a supervisor signals the whole process group. Does nothing twice.

    Arguments:
        backend: the result backend of this thread.
    """
    count = backend.on_chord_part_return
    if getattr(count, "_is_wrapped", False):
        return

    @wraps(count)
    def whole(*args: Any, **kwargs: Any) -> Any:
        late_end = _late_end()
        if late_end is None:
            return count(*args, **kwargs)
        late_end.may_end_at = time.monotonic() + _LONGEST_COUNT_SECONDS
        try:
            return count(*args, **kwargs)
        finally:
            late_end.may_end_at = time.monotonic() + _REPORT_SECONDS

    whole._is_wrapped = True  # type: ignore[attr-defined]
    backend.on_chord_part_return = whole


class _LateEnd:
    """A handler of the signal that calls billiard's once the process may end.

    Arguments:
        end: billiard's.
    """

    def __init__(self, end: Callable[[int, Any], object]) -> None:
        self._end = end
        self._is_waiting = False
        #: By the monotonic clock.
        self.may_end_at = -math.inf

    def __call__(self, number: int, frame: Any) -> None:
        if time.monotonic() >= self.may_end_at:
            self._end(number, frame)
        elif not self._is_waiting:
            self._is_waiting = True
            if start_daemon("sqs-end", self._signal_again) is None:
                self._end(number, frame)

    def _signal_again(self) -> None:
        while (seconds := self.may_end_at - time.monotonic()) > 0:
            time.sleep(min(seconds, _REPORT_SECONDS))
        self._is_waiting = False
        os.kill(os.getpid(), TERM_SIGNAL)


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
