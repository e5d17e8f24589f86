"""Seconds that go on while the machine sleeps: SQS's visibility timeouts do."""

from __future__ import annotations

import time
from typing import Final

#: Linux stops CLOCK_MONOTONIC during a suspend, but not CLOCK_BOOTTIME; macOS does it the other way
#: round for ``time.monotonic()``, whose CLOCK_MONOTONIC goes on.
#: https://docs.python.org/3/library/time.html#time.CLOCK_BOOTTIME
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_seconds() -> float:
    """Seconds since some time in the past; never goes back, and counts a suspend."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
