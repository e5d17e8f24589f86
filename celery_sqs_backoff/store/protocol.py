"""The four atomic methods that every store has.

Guards, steps, locks and workflows use only these methods. So do the call rates that workers share,
and the status that workers publish.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, runtime_checkable

from ..retry.policies import to_seconds

#: Seconds for which a record is kept, unless a guard's window or a lock's lease says otherwise. The
#: 30 days outlast a message. SQS keeps a message for at most 14 days in its queue, and for another
#: 14 days in the dead-letter queue.
KEEP_SECONDS = 30 * 24 * 3600.0

#: Longest time for which a record may be kept, in days. A longer time could overflow a timestamp.
_MAX_DAYS = 36_500


@runtime_checkable
class Store(Protocol):
    """Keeps records: a text for each key, with a time at which the record ends.

    All four methods are atomic, and their changes are durable when they return. ``ttl`` is the
    number of seconds, above 0, until the record ends. After its end, every method treats the record
    as missing. Keys and values are compared exactly, including case, accents and trailing spaces.

    Raises:
        errors.StoreUnavailable: the store did not answer. The call may still have taken effect.
    """

    def add(self, key: str, value: str, ttl: float) -> str | None:
        """Create the record and return ``None``. If it exists, return its value instead."""

    def get(self, key: str) -> str | None:
        """Return the record's value, or ``None`` if there is no record."""

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        """Replace the value ``old`` by ``new``. Return False if the record had another value.

        The record then ends ``ttl`` seconds from now. With ``ttl=None`` its end does not change.
        """

    def delete(self, key: str, old: str) -> bool:
        """Delete the record if its value is ``old``, and return whether it was deleted."""


def seconds_kept(name: str, value: float | timedelta) -> float:
    """Return how long to keep a record, in seconds.

    Arguments:
        name: the argument's name, for the error's text.
        value: seconds or timedelta above 0, up to 36,500 days.

    Raises:
        TypeError: the value is not a number or a timedelta.
        ValueError: the value is 0 or less, or too long.
    """
    seconds = to_seconds(name, value, may_be_zero=False)
    if seconds > timedelta(days=_MAX_DAYS).total_seconds():
        raise ValueError(f"invalid {name} {value!r}: expected up to {_MAX_DAYS} days")
    return seconds
