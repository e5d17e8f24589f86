"""Text from outside, made safe to print: a message's sender must not write our log or terminal.

Names and texts in a message are whatever its sender chose: megabytes, line ends that fake a log
line, escape sequences that a terminal obeys, marks that reverse the reading order.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

#: Enough for a task's name, an id or a queue's name.
_NAME_CHARACTERS = 200

#: Places that a log line names of a bug of ours, in place of its traceback.
BUG_CALLS = 6

#: Numbers with more digits than an id or a count has are not worth showing.
_MAX_BITS = 128


def printable(value: object, limit: int = _NAME_CHARACTERS) -> str:
    """Return a value from outside as one short line of printable characters.

    Cuts first, so that the cost does not depend on the value's size. Control characters, line
    ends, marks for the reading direction and other invisible characters become their escapes.
    Never raises.

    Args:
        value: a string, a small number, a boolean or ``None``. Of anything else only the type is
            shown: its ``repr`` may be huge, deep, or the user's.
        limit: characters of the result, the dots that mark a cut not counted. Default 200.
    """
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() else _escape(c) for c in value[:limit])
        return escaped if len(escaped) == len(value) else _cut(escaped, value, limit)
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if type(value) is int and value.bit_length() <= _MAX_BITS:
        return str(value)
    return f"<{type(value).__name__[:limit]}>"


def type_name(exc: BaseException) -> str:
    """Return the qualified name of an exception's class, as ``smtplib.SMTPServerDisconnected``."""
    cls = type(exc)
    return printable(f"{cls.__module__}.{cls.__qualname__}")


def error_site(exc: BaseException, *, calls: int = 1) -> str:
    """Say what was raised and where, without its text: ``builtins.OSError at undo.py:3 in undo``.

    The texts of an exception, and of those it is chained to, may quote a task's arguments or a
    credential, and a formatted traceback holds them all.

    Args:
        calls: how many places to name, the innermost first. Default 1; a bug of ours needs more.
    """
    places = [_place(traceback) for traceback in _walked(exc.__traceback__)][-calls:]
    if not places:
        return type_name(exc)
    return f"{type_name(exc)} at {' < '.join(reversed(places))}"


def _walked(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _place(traceback: TracebackType) -> str:
    code = traceback.tb_frame.f_code
    return printable(f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}")


def _cut(escaped: str, value: str, limit: int) -> str:
    is_whole = len(value) <= limit and len(escaped) <= limit
    return escaped if is_whole else f"{escaped[:limit]}..."


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
