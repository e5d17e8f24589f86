"""The four atomic methods that every store has.

Guards, steps, workflows, locks, keys and agreed rates are built above these.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, runtime_checkable

from ..retry.policies import to_seconds

#: How long records are kept that have no window or lease of their own: 30 days. SQS keeps a
#: message for 14 days at the most, and the dead-letter queue after it as long again.
KEEP_SECONDS = 30 * 24 * 3600.0

#: Longest time for which a record may be kept, in days: every store can add it to its clock.
_MAX_DAYS = 36_500


@runtime_checkable
class Store(Protocol):
    """Records, text by key, each with an end. All four are atomic, and durable when they return.

    ``ttl`` is seconds above 0. After its end a record is not there, for any of them. Keys and
    values are compared exactly: case, accents and trailing spaces count.

    Raises:
        errors.StoreUnavailable: the store did not answer. The call may have taken effect all the
            same.
    """

    def add(self, key: str, value: str, ttl: float) -> str | None:
        """Create the record and return ``None``, or return the value that is there."""

    def get(self, key: str) -> str | None:
        """Return the value, or ``None``."""

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        """Put ``new`` in place of ``old``, and return whether ``old`` was there.

        The record gets a new end; ``ttl=None`` keeps the one that it has.
        """

    def delete(self, key: str, old: str) -> bool:
        """Delete the record if its value is ``old``, and return whether it was."""


def seconds_kept(name: str, value: float | timedelta) -> float:
    """Return the seconds, above 0, for which to keep a record.

    Arguments:
        name: the argument's name, for the error.
        value: seconds or timedelta, up to 100 years.

    Raises:
        TypeError: it is no number and no timedelta.
        ValueError: it is 0 or less, or too long.
    """
    seconds = to_seconds(name, value, may_be_zero=False)
    if seconds > timedelta(days=_MAX_DAYS).total_seconds():
        raise ValueError(f"invalid {name} {value!r}: expected up to {_MAX_DAYS} days")
    return seconds
