"""Read and write rates and durations in the form that people use, such as ``10/s`` and ``2d``."""

from __future__ import annotations

import re
from datetime import timedelta

from .retry.policies import to_seconds

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\s*(?:(\d+(?:\.\d+)?)\s*([smhd]))", re.IGNORECASE)


def parse_rate(value: str | float | None, name: str = "rate") -> float | None:
    """Read Celery's rate syntax, such as ``"10/s"``, ``"300/m"`` and ``"7200/h"``.

    Arguments:
        value: text, or a number per second. ``None`` = no limit.
        name: name of the option, for the error's text.

    Returns:
        The number per second, or ``None`` for ``None``.

    Raises:
        TypeError: the value is not text or a number.
        ValueError: the value is not a rate, or not above 0.
    """
    # Import Celery only here, because modules that must not depend on Celery import this module.
    from celery.utils.time import rate as celery_rate

    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"invalid {name} {value!r}: expected text such as '60/s', or a number")
    try:
        per_second = float(celery_rate(value.strip() if isinstance(value, str) else value))
    except (KeyError, ValueError, OverflowError):
        per_second = 0.0
    if not 0 < per_second < float("inf"):
        raise ValueError(
            f"invalid {name} {value!r}: expected messages per second, minute or hour, for example"
            " '10/s', '300/m' or '7200/h'"
        )
    return per_second


def parse_duration(value: str | float | timedelta | None, name: str) -> float | None:
    """Read a duration, such as ``"90s"``, ``"10m"``, ``"36h"``, ``"2d"`` or ``"1h30m"``.

    Arguments:
        value: text, seconds or a timedelta. ``None`` = not given.
        name: name of the option, for the error's text.

    Returns:
        Seconds, or ``None`` for ``None``.

    Raises:
        ValueError: the text is not a duration, or the value is negative, infinite or NaN.
        TypeError: the value is not text, a number or a timedelta.
    """
    if value is None or not isinstance(value, str):
        return None if value is None else to_seconds(name, value)
    parts = _DURATION.findall(value)
    if value.strip().isdigit():
        return float(value)
    if not parts or _DURATION.sub("", value).strip():
        raise ValueError(
            f"invalid {name} {value!r}: expected a number with a unit of s, m, h or d, for example"
            " '90s', '10m' or '1h30m'"
        )
    return sum(float(number) * _UNITS[unit.lower()] for number, unit in parts)


def spell_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``"2 d 3 h"`` or ``"4 min 10 s"``."""
    left = int(max(0, seconds))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def in_words(seconds: float) -> str:
    """Return a duration in one written-out unit, such as ``"3.5 minutes"`` or ``"36 hours"``."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= (1.5 if unit != "day" else 2) * length:
            number = round(seconds / length, 1)
            return f"{number:g} {unit}s"
    number = round(seconds, 1)
    return f"{number:g} second{'' if number == 1 else 's'}"
