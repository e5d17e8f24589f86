"""What do the errors of httpx mean? https://www.python-httpx.org/exceptions/"""

from __future__ import annotations

from ..outcomes import Classifier
from .answers import read_answer
from .exchange import Finding, LibraryErrors, Meaning, Rule
from .traces import frames

__all__ = ["RULES", "httpx_errors"]


def _answered(exc: BaseException) -> Finding | None:
    return read_answer(getattr(exc, "response", None))


RULES: tuple[Rule, ...] = (
    Rule("httpx", "HTTPStatusError", _answered, "its status decides"),
    Rule(
        "httpx",
        "ConnectError ConnectTimeout PoolTimeout ProxyError",
        Meaning.NOT_SENT,
        "DNS, a refused connection, none in time or none free, a proxy's tunnel, the TLS handshake",
    ),
    Rule("httpx", "UnsupportedProtocol InvalidURL", Meaning.REFUSED, "httpx would not send it"),
    Rule(
        "httpx",
        "TimeoutException ReadTimeout WriteTimeout NetworkError ReadError WriteError CloseError"
        " RemoteProtocolError",
        Meaning.IN_DOUBT,
        "reset, silence, half an answer or one that is not HTTP after the request began to leave",
    ),
)


def _redirected(exc: BaseException) -> bool:
    history = getattr(getattr(exc, "response", None), "history", None)
    for module, function, frame in frames(exc):
        if (module, function) == ("httpx._client", "_send_handling_redirects"):
            history = history or frame.f_locals.get("history")  # the error itself has none
    # 307 and 308 pass the request on undone (RFC 9110, 15.4.8 and 15.4.9).
    return any(response.status_code not in (307, 308) for response in history or ())


def httpx_errors(*, idempotent: bool = False) -> Classifier:
    """Classify the errors of httpx; a status only becomes one by ``raise_for_status()``.

    Arguments:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request left is RETRYABLE. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors(name="httpx", rules=RULES, idempotent=idempotent, redirected=_redirected)
