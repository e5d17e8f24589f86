"""Read and print text from outside. A message's sender must not control our log or terminal.

The sender chooses the names and texts in a message. They may be megabytes, line ends that fake a
log line, escape sequences that a terminal obeys, or marks that reverse the reading order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any

#: Enough for a task's name, an id or a queue's name.
_NAME_CHARACTERS = 200

#: A log line about a bug of ours names this number of places instead of a traceback.
BUG_CALLS = 6

#: Ids and counts are smaller than this. A larger number is not worth showing.
_MAX_BITS = 128

#: JSON from outside may nest so deep. Python's own limit depends on its version.
_MAX_JSON_DEPTH = 500

#: More digits than any count or time has. Python reads longer numbers in quadratic time.
_MAX_DIGITS = 20


def printable(value: object, limit: int = _NAME_CHARACTERS) -> str:
    """Return a value from outside as one short line of printable characters.

    Cuts first, so that the cost does not depend on the value's size. Control characters, line
    ends, marks for the reading direction and other invisible characters become their escapes.
    Never raises.

    Args:
        value: a string, a small number, a boolean or ``None``. For anything else only the type is
            shown, because its ``repr`` may be huge, deep, or user data.
        limit: characters of the result, the dots that mark a cut not counted. Default 200.
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
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def type_name(exc: BaseException) -> str:
    """Return the qualified name of an exception's class, as ``smtplib.SMTPServerDisconnected``."""
    cls = type(exc)
    return printable(f"{cls.__module__}.{cls.__qualname__}")


def error_site(exc: BaseException, *, calls: int = 1) -> str:
    """Return an exception's type and place, as in ``builtins.OSError at undo.py:3 in undo``.

    It leaves out the texts of the exception and of its chain. They may quote a task's arguments or
    a credential, and a formatted traceback holds them all.

    Args:
        calls: how many places to name, the innermost first. Default 1; a bug of ours needs more.
    """
    places = [
        printable(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
        for frame, line in walk_tb(exc.__traceback__)
    ]
    return " at ".join(filter(None, (type_name(exc), " < ".join(places[: -calls - 1 : -1]))))


def read_json_object(
    text: object, loads: Callable[[Any], Any] | None = None
) -> dict[str, Any] | None:
    """Read a JSON object that a stranger may have written, or return ``None`` for any other text.

    Numbers that no count or time has are infinite.

    Args:
        loads: reads JSON. kombu's also makes objects, of which any may fail.
    """
    try:
        found = json.loads(text, parse_int=_parse_int) if loads is None else loads(text)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # it is not text, not JSON, nested too deep, or no object
        return None
    return found if isinstance(found, dict) and not nests_too_deep(found) else None


def nests_too_deep(value: object) -> bool:
    """Return whether lists and dicts nest more than 500 levels deep, which may be unreadable."""
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
