"""What do the errors of urllib, http.client and urllib3 mean?

https://docs.python.org/3/library/urllib.request.html and https://urllib3.readthedocs.io
"""

from __future__ import annotations

import time

from ..outcomes import Classifier
from .answers import answer
from .exchange import Finding, LibraryErrors, Meaning, Rule
from .traces import before_the_request, entered, frames, wrapped

__all__ = ["RULES", "nothing_was_sent", "urllib_errors"]

_URLLIB = "urllib.error"
_HTTP_CLIENT = "http.client"
_URLLIB3 = "urllib3.exceptions"

_NO_CONNECTION = Rule(
    _URLLIB3,
    "NewConnectionError NameResolutionError ConnectTimeoutError",
    Meaning.NOT_SENT,
    "DNS, a refused connection, or none in time",
)


def nothing_was_sent(exc: BaseException) -> bool:
    """Does a urllib3 error that made no connection, or a failed handshake, lie at the bottom?"""
    return any(_NO_CONNECTION.fits(error) for error in wrapped(exc)) or before_the_request(exc)


def _answered(exc: BaseException) -> Finding | None:
    return answer(getattr(exc, "code", None), getattr(exc, "headers", None), now=time.time())


def _has_a_cause(exc: BaseException) -> bool:
    return isinstance(getattr(exc, "reason", None), BaseException)


def _in_http_client(exc: BaseException) -> bool:
    return bool(entered(exc, _HTTP_CLIENT))


RULES: tuple[Rule, ...] = (
    Rule(_URLLIB, "HTTPError", _answered, "its status decides"),
    Rule(
        _URLLIB,
        "URLError",
        Meaning.NOT_SENT,
        "DNS, a refused or late connection, a proxy's tunnel or the TLS handshake",
        before_the_request,
    ),
    Rule(_URLLIB, "ContentTooShortError", Meaning.IN_DOUBT, "half an answer"),
    Rule(_URLLIB, "URLError", Meaning.IN_DOUBT, "while the request left", _has_a_cause),
    Rule(_HTTP_CLIENT, "InvalidURL", Meaning.REFUSED, "http.client would not send it"),
    Rule(
        _HTTP_CLIENT,
        "BadStatusLine RemoteDisconnected IncompleteRead LineTooLong UnknownProtocol"
        " UnknownTransferEncoding",
        Meaning.IN_DOUBT,
        "no answer, half an answer, or one that is not HTTP",
    ),
    Rule(
        "builtins",
        "OSError",
        Meaning.NOT_SENT,
        "raised in http.client, which was connecting",
        lambda exc: _in_http_client(exc) and before_the_request(exc),
    ),
    Rule(
        "builtins",
        "OSError",
        Meaning.IN_DOUBT,
        "raised in http.client: reset or silence after the request left",
        _in_http_client,
    ),
    _NO_CONNECTION,
    Rule(
        _URLLIB3,
        "MaxRetryError ProxyError SSLError ProtocolError TimeoutError ReadTimeoutError",
        Meaning.NOT_SENT,
        "one of these, a proxy's tunnel or the TLS handshake",
        nothing_was_sent,
    ),
    Rule(_URLLIB3, "EmptyPoolError", Meaning.NOT_SENT, "no free connection"),
    Rule(
        _URLLIB3,
        "LocationValueError LocationParseError URLSchemeUnknown ProxySchemeUnknown InvalidHeader",
        Meaning.REFUSED,
        "urllib3 would not send it",
    ),
    Rule(_URLLIB3, "ResponseNotChunked", None, "the answer came; it was read the wrong way"),
    Rule(
        _URLLIB3,
        "MaxRetryError ProxyError SSLError ProtocolError TimeoutError ReadTimeoutError"
        " IncompleteRead InvalidChunkLength",
        Meaning.IN_DOUBT,
        "reset, silence or half an answer after the request began to leave",
    ),
)


def _redirected(exc: BaseException) -> bool:
    if "http_error_302" in entered(exc, "urllib.request"):
        return True
    # urllib3's pool manager follows a redirect by calling itself.
    calls = [
        frame.f_code
        for module, function, frame in frames(exc)
        if (module, function) == ("urllib3.poolmanager", "urlopen")
    ]
    return len(calls) > len(set(calls))


def urllib_errors(*, idempotent: bool = False) -> Classifier:
    """Classify the errors of urllib.request, http.client and urllib3.

    A status is an error in urllib.request; urllib3 and http.client leave it to the caller.

    Arguments:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request left is RETRYABLE. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors(name="urllib", rules=RULES, idempotent=idempotent, redirected=_redirected)
