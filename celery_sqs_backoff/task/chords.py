"""A chord's last part sends its body, although its process is told to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from billiard.common import TERM_SIGNAL

__all__ = ["count_parts_whole"]


def count_parts_whole(backend: Any) -> None:
    """Let no SIGTERM end a pool process while it counts a part of a chord. Does nothing twice.

    All versions: billiard makes a SystemExit of the signal, and the Redis backend, which sends the
    body of a complete chord, notes in a ``finally`` that it is sent: such a chord never ends. Seen
    where a supervisor signals the whole process group. The process ends once the part is counted.

    Arguments:
        backend: the result backend of this thread.
    """
    count = backend.on_chord_part_return
    if getattr(count, "_is_wrapped", False):
        return

    @wraps(count)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with _termination_put_off():
            return count(*args, **kwargs)

    whole._is_wrapped = True  # type: ignore[attr-defined]
    backend.on_chord_part_return = whole


@contextmanager
def _termination_put_off() -> Iterator[None]:
    handler = signal.getsignal(TERM_SIGNAL)
    is_pools = getattr(handler, "__module__", None) == "billiard.common"
    if not is_pools or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(TERM_SIGNAL, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(TERM_SIGNAL, handler)
        if came:
            os.kill(os.getpid(), TERM_SIGNAL)
