"""The policies that compute the delay before a failed task is tried again.

A policy computes the delay from how often the task has failed, and from random numbers. The caller
passes the source of random numbers in.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol


class RandomSource(Protocol):
    """A source of random numbers, such as the ``random`` module or a ``random.Random``."""

    def uniform(self, a: float, b: float, /) -> float: ...


class Policy(ABC):
    """Gives a delay for each failure. Base class of the policies here, and of your own policies.

    A subclass must define ``ceiling``. A subclass with jitter also overrides ``delay``.
    """

    @abstractmethod
    def ceiling(self, attempt: int) -> float:
        """Return the longest delay in seconds after failure number ``attempt`` (1 = the first)."""

    def delay(self, attempt: int, rng: RandomSource = random) -> float:
        """Draw the delay in seconds after failure number ``attempt`` (1 = the first).

        Without jitter this is the ceiling, and ``rng`` is not used.
        """
        return self.ceiling(attempt)

    def delay_for(self, message_id: str, attempt: int, rng: RandomSource = random) -> float:
        """Draw the delay in seconds for one message. Only ``DecorrelatedJitter`` uses the ID."""
        return self.delay(attempt, rng)


@dataclass(frozen=True, init=False)
class _Growing(Policy):
    """A policy with delays that grow from ``base`` to ``cap``. Both are kept as float seconds."""

    base: float
    cap: float

    def __init__(self, base: float | timedelta = 2, cap: float | timedelta = 3600) -> None:
        base_seconds = to_seconds("base", base, may_be_zero=False)
        cap_seconds = to_seconds("cap", cap, may_be_zero=False)
        if cap_seconds < base_seconds:
            raise ValueError(f"invalid cap {cap!r}: expected at least the base, {base!r}")
        object.__setattr__(self, "base", base_seconds)  # a frozen dataclass allows no other way
        object.__setattr__(self, "cap", cap_seconds)

    def ceiling(self, attempt: int) -> float:
        return self._grow(2.0, attempt - 1)

    def _grow(self, factor: float, times: int) -> float:
        try:
            return min(self.cap, self.base * factor**times)
        except OverflowError:
            # The power is too large for a float, for example at attempt 10,000. The delay has
            # reached the cap long before.
            return self.cap


class Exponential(_Growing):
    """Doubles the delay after each failure, without jitter.

    The delay is ``min(cap, base * 2**(attempt - 1))``, by default 2, 4, 8, ... 2048, 3600, 3600
    seconds. Messages that fail together come back together. Prefer ``FullJitter`` unless exact
    delays matter more than the provider's load.

    Arguments:
        base: the first delay, seconds or timedelta, above 0. Default 2.
        cap: the longest delay, seconds or timedelta, at least ``base``. Default 3600.

    Raises:
        TypeError: ``base`` or ``cap`` is not a number or a timedelta.
        ValueError: ``base`` or ``cap`` is out of range, infinite or NaN.
    """


class FullJitter(_Growing):
    """Draws each delay between 0 and a ceiling, which doubles after each failure.

    The delay is ``uniform(0, min(cap, base * 2**(attempt - 1)))``. By default, the ceiling is 2, 4,
    8, ... 2048, 3600, 3600 seconds, and the delay is half of that on average. No delay is above the
    cap. When the ceiling has reached the cap, the delays are still spread from 0 to the cap. This
    is "Full Jitter" of
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    Arguments:
        base: the first ceiling, seconds or timedelta, above 0. Default 2.
        cap: the highest ceiling, seconds or timedelta, at least ``base``. Default 3600.

    Raises:
        TypeError: ``base`` or ``cap`` is not a number or a timedelta.
        ValueError: ``base`` or ``cap`` is out of range, infinite or NaN.
    """

    def delay(self, attempt: int, rng: RandomSource = random) -> float:
        """Draw uniformly between 0 and the ceiling, in seconds."""
        return rng.uniform(0, self.ceiling(attempt))


class EqualJitter(_Growing):
    """Draws each delay between half of a ceiling and the ceiling, which doubles after each failure.

    With ``half = min(cap, base * 2**(attempt - 1)) / 2`` the delay is ``half + uniform(0, half)``.
    By default it lies between 1 and 2, 2 and 4, 4 and 8, ... 1800 and 3600 seconds, and is three
    quarters of the ceiling on average. No delay is above the cap or near 0, but the delays are
    spread only half as widely as with ``FullJitter``. This is "Equal Jitter" of
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    Arguments:
        base: the first ceiling, seconds or timedelta, above 0. Default 2.
        cap: the highest ceiling, seconds or timedelta, at least ``base``. Default 3600.

    Raises:
        TypeError: ``base`` or ``cap`` is not a number or a timedelta.
        ValueError: ``base`` or ``cap`` is out of range, infinite or NaN.
    """

    def delay(self, attempt: int, rng: RandomSource = random) -> float:
        """Draw uniformly between half the ceiling and the ceiling, in seconds."""
        half = self.ceiling(attempt) / 2
        return half + rng.uniform(0, half)


class DecorrelatedJitter(_Growing):
    """Draws each delay between ``base`` and three times the delay before.

    Delay number n is ``d[n] = min(cap, uniform(base, 3 * d[n - 1]))``, and ``d[0]`` is ``base``. By
    default, no delay is below 2 seconds, and the highest possible delays are 6, 18, 54, ... 1458,
    3600, 3600 seconds. A draw above the cap becomes exactly ``cap``. So of many messages that have
    failed for a long time, about a quarter wait exactly ``cap`` and come back together.
    ``FullJitter`` has no such peak.

    No state is stored between attempts. The message's ID seeds its chain of draws. Each attempt
    draws the chain again from the start, up to its own delay, so every worker gets the same delay.
    Attempt number n costs n draws. This is "Decorrelated Jitter" of
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    Arguments:
        base: the shortest delay, seconds or timedelta, above 0. Default 2.
        cap: the longest delay, seconds or timedelta, at least ``base``. Default 3600.

    Raises:
        TypeError: ``base`` or ``cap`` is not a number or a timedelta.
        ValueError: ``base`` or ``cap`` is out of range, infinite or NaN.
    """

    def ceiling(self, attempt: int) -> float:
        """Return ``min(cap, base * 3**attempt)`` seconds, as if all draws were the highest."""
        return self._grow(3.0, attempt)

    def delay(self, attempt: int, rng: RandomSource = random) -> float:
        """Draw a whole chain of ``attempt`` delays from ``rng`` and return its last, in seconds."""
        ceiling = self.ceiling(attempt)
        delay = self.base
        for _ in range(attempt):
            delay = min(self.cap, rng.uniform(self.base, 3 * delay))
        return min(ceiling, delay)  # rounding may carry the highest draws above the ceiling

    def delay_for(self, message_id: str, attempt: int, rng: RandomSource = random) -> float:
        """Return delay number ``attempt`` of the message's own chain, in seconds.

        ``rng`` is not used. The same ID and attempt give the same delay in every process.
        """
        # random.Random hashes a str seed with SHA-512, not with the per-process hash().
        return self.delay(attempt, random.Random(message_id))


@dataclass(frozen=True, init=False)
class Schedule(Policy):
    """Takes the delays from a list. After the end of the list, its last delay repeats.

    ``Schedule([1, 5, timedelta(minutes=1)])`` gives 1, 5, 60, 60, ... seconds. The values may stand
    in any order. The schedule adds no jitter and no cap. The end of the list does not end the
    retries. To limit the retries, set ``max_retries`` or ``retry_for``.

    Arguments:
        delays: at least one delay, each in seconds or as a timedelta, from 0 up. Kept as a tuple of
            float seconds.

    Raises:
        TypeError: ``delays`` is not a list, or a delay is not a number or a timedelta.
        ValueError: ``delays`` is empty, or a delay is negative, infinite or NaN.
    """

    delays: tuple[float, ...]

    def __init__(self, delays: Iterable[float | timedelta]) -> None:
        if not isinstance(delays, Iterable):
            raise TypeError(f"invalid delays {delays!r}: expected a list of delays")
        seconds = tuple(to_seconds(f"delays[{i}]", delay) for i, delay in enumerate(delays))
        if not seconds:
            raise ValueError("invalid delays: expected at least one")
        object.__setattr__(self, "delays", seconds)

    def ceiling(self, attempt: int) -> float:
        return self.delays[min(attempt, len(self.delays)) - 1]


def to_seconds(name: str, value: object, *, may_be_zero: bool = True) -> float:
    """Convert seconds or a timedelta to float seconds. Error messages call the value ``name``.

    Raises:
        TypeError: ``value`` is not a number or a timedelta. A bool is not a number here.
        ValueError: ``value`` is negative, infinite or NaN, or it is 0 and ``may_be_zero`` is false.
    """
    expected = f"seconds or a timedelta, {'from 0 up' if may_be_zero else 'above 0'}, finite"
    refusal = f"invalid {name} {value!r}: expected {expected}"
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(refusal)
    try:
        seconds = float(number)
    except OverflowError:  # an int that is too large for a float
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not may_be_zero):
        raise ValueError(refusal)
    return seconds
