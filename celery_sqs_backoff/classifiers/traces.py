"""Where was the library when the error was raised?

Some errors say nothing of that themselves: a timeout is the same class while a connection is made
and while an answer is awaited. Their traceback knows. It is used as evidence for one thing only,
that the request had not left; without a traceback a failure stays in doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType

__all__ = ["before_the_request", "entered", "frames", "wrapped"]

# gevent and eventlet bring their own socket and ssl modules.
_SOCKETS = ("socket", "ssl", "gevent", "eventlet")


def frames(exc: BaseException) -> Iterator[tuple[str, str, FrameType]]:
    """Module, function and frame of each call the error has passed, the outermost first."""
    for frame, _ in walk_tb(exc.__traceback__):
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, frame


def entered(exc: BaseException, module: str) -> set[str]:
    """Names of the functions of a module that the error has passed."""
    return {function for name, function, _ in frames(exc) if name == module}


def wrapped(exc: BaseException) -> Iterator[BaseException]:
    """The error, and those that urllib3, requests, urllib and botocore have wrapped in it.

    They keep them in ``args``, ``reason``, ``kwargs["error"]`` or ``__cause__``. What was merely
    being handled (``__context__``) is left out: it need not be the reason.
    """
    waiting: list[object] = [exc]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        kwargs = getattr(error, "kwargs", None)
        waiting += [
            *error.args,
            getattr(error, "reason", None),
            kwargs.get("error") if isinstance(kwargs, dict) else None,
            error.__cause__,
        ]


def before_the_request(exc: BaseException) -> bool:
    """Did a connection, a proxy's tunnel or a TLS handshake fail? Nothing was sent then."""
    return any(
        _connects(module, function) for e in wrapped(exc) for module, function, _ in frames(e)
    )


def _connects(module: str, function: str) -> bool:
    if function == "_tunnel":
        return module in ("http.client", "urllib3.connection")
    return module.partition(".")[0] in _SOCKETS and function in (
        "create_connection",
        "do_handshake",
    )
