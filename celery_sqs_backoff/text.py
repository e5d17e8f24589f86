"""Clean text from outside, so that a message's sender cannot control a log or terminal.

The sender chooses the names and texts in a message. They may be megabytes long. They may contain
line ends that forge a log line, escape sequences for the terminal, or marks that reverse the
reading order.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any

#: Default limit of ``printable``. Names of tasks and queues, and IDs, are mostly shorter.
_NAME_CHARACTERS = 200

#: A log line about a bug of this package names at most this many calls, from the traceback's end.
BUG_CALLS = 6

#: ``printable`` shows only the type of an integer with more bits. IDs and counts have fewer.
_MAX_BITS = 128

#: Deepest nesting that is accepted in JSON. Python's own limit depends on its version.
_MAX_JSON_DEPTH = 500

#: An integer with more digits is read as infinity. Counts and times have fewer, and Python's time
#: to parse an integer grows with the square of its length.
_MAX_DIGITS = 20


def printable(value: object, limit: int = _NAME_CHARACTERS) -> str:
    """Return a value from outside as one short line of printable characters.

    The value is cut first, so that the cost does not depend on its size. Control characters, line
    ends, marks for the reading direction and other invisible characters are escaped. Never raises.

    Args:
        value: a string, a small number, a boolean or ``None``. Of any other value only the type is
            shown, because its ``repr`` may be huge, deep, or user data.
        limit: largest number of characters, without the dots that mark a cut. Default 200.
    """
    if isinstance(value, str):
        if len(value) <= limit and value.isprintable():
            return value
        escaped = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
            for c in value[:limit]
        )
        return escaped if max(len(value), len(escaped)) <= limit else f"{escaped[:limit]}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if type(value) is int and value.bit_length() <= _MAX_BITS:
        return str(value)
    return f"<{type(value).__name__[:limit]}>"


def name_some(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names as text, such as ``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def type_name(exc: BaseException) -> str:
    """Return an exception's class with its module, such as ``smtplib.SMTPServerDisconnected``."""
    cls = type(exc)
    return printable(f"{cls.__module__}.{cls.__qualname__}")


def error_site(exc: BaseException, *, calls: int = 1) -> str:
    """Return an exception's type and place, such as ``builtins.OSError at undo.py:3 in undo``.

    The texts of an exception and of its causes may quote a task's arguments or a credential. A
    formatted traceback would contain these texts, so the result leaves them out.

    Args:
        calls: number of calls in the traceback to name, the innermost first. Default 1.
    """
    places = [
        printable(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
        for frame, line in walk_tb(exc.__traceback__)
    ]
    return " at ".join(filter(None, (type_name(exc), " < ".join(places[: -calls - 1 : -1]))))


def read_json_object(
    text: object, loads: Callable[[Any], Any] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object in a text from any sender, or ``None`` if the text is anything else.

    Args:
        loads: function that reads JSON. ``None`` = ``json.loads``, which here reads an integer of
            more than 20 digits as infinity. kombu's ``loads`` also creates objects such as dates,
            and may raise any exception.
    """
    try:
        found = json.loads(text, parse_int=_parse_int) if loads is None else loads(text)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # not a text, not JSON, nested too deep, or ``loads`` failed
        return None
    return found if isinstance(found, dict) and not nests_too_deep(found) else None


def read_body(
    body: str, loads: Callable[[str | bytes], Any] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object in a message's body, plain or in base64, or ``None`` without one.

    Args:
        loads: as for :func:`read_json_object`.
    """
    if body.lstrip().startswith("{"):
        return read_json_object(body, loads)
    try:
        return read_json_object(base64.b64decode(body, validate=True), loads)
    except ValueError:
        return None


def nests_too_deep(value: object) -> bool:
    """Return whether lists and dicts nest so deep (over 500 levels) that ``json`` may fail."""
    level: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH + 1):
        outer, level = level, []
        for each in outer:
            if isinstance(each, dict):
                level += each.values()
            elif isinstance(each, list | tuple):
                level += each
        if not level:
            return False
    return True


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf
