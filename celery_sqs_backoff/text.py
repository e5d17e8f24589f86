"""Make text from outside safe to print. A message's sender must not control our log or terminal.

The sender chooses the names and texts in a message. They may be megabytes, line ends that fake a
log line, escape sequences that a terminal obeys, or marks that reverse the reading order.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

#: Enough for a task's name, an id or a queue's name.
_NAME_CHARACTERS = 200

#: A log line about a bug of ours names this number of places instead of a traceback.
BUG_CALLS = 6

#: Ids and counts are smaller than this. A larger number is not worth showing.
_MAX_BITS = 128


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
    """Return an exception's type and place, as in ``builtins.OSError at undo.py:3 in undo``.

    It leaves out the texts of the exception and of its chain. They may quote a task's arguments or
    a credential, and a formatted traceback holds them all.

    Args:
        calls: how many places to name, the innermost first. Default 1; a bug of ours needs more.
    """
    places = [_place(traceback) for traceback in _walk(exc.__traceback__)][-calls:]
    if not places:
        return type_name(exc)
    return f"{type_name(exc)} at {' < '.join(reversed(places))}"


def _walk(traceback: TracebackType | None) -> Iterator[TracebackType]:
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
