"""Classify the errors of urllib, http.client and urllib3.

https://docs.python.org/3/library/urllib.request.html and https://urllib3.readthedocs.io
"""

from __future__ import annotations

import time
from functools import partial

from ..retry.outcomes import Classifier
from ..traces import (
    before_the_request,
    certificate_rejected,
    frames,
    iter_wrapped,
    list_functions,
    proxy_wants_credentials,
    was_tried_before,
)
from .answers import answer
from .exchange import NOT_CONNECTED, UNTRUSTED, Diagnosis, ErrorRule, LibraryErrors, Meaning

_urllib = partial(ErrorRule, "urllib.error")
_http_client = partial(ErrorRule, "http.client")
_os_error = partial(ErrorRule, "builtins", "OSError")
_urllib3 = partial(ErrorRule, "urllib3.exceptions")


def is_first_attempt(exc: BaseException) -> bool:
    return not was_tried_before(exc)


_NO_CONNECTION = _urllib3(
    "NewConnectionError NameResolutionError ConnectTimeoutError",
    Meaning.NOT_SENT,
    "DNS, a refused connection, or a timeout while connecting",
    is_first_attempt,
)


def nothing_was_sent(exc: BaseException) -> bool:
    """Return whether the request failed before it was sent, while urllib3 was connecting.

    False if urllib3 itself had made an earlier attempt that may have been sent.
    """
    return not was_tried_before(exc) and (
        any(_NO_CONNECTION.fits(error) for error in iter_wrapped(exc)) or before_the_request(exc)
    )


def can_never_be_sent(exc: BaseException) -> bool:
    """Return whether the request can never be sent (untrusted certificate, 407 of a proxy)."""
    return nothing_was_sent(exc) and (certificate_rejected(exc) or proxy_wants_credentials(exc))


def _read_status(exc: BaseException) -> Diagnosis | None:
    return answer(getattr(exc, "code", None), getattr(exc, "headers", None), now=time.time())


def _in_http_client(exc: BaseException) -> bool:
    return bool(list_functions(exc, "http.client"))


RULES: tuple[ErrorRule, ...] = (
    _urllib("HTTPError", _read_status, "its status decides"),
    _urllib("URLError", Meaning.REFUSED, UNTRUSTED, can_never_be_sent),
    _urllib("URLError", Meaning.NOT_SENT, NOT_CONNECTED, before_the_request),
    _urllib("ContentTooShortError", Meaning.IN_DOUBT, "an incomplete answer"),
    _urllib(
        "URLError",
        Meaning.IN_DOUBT,
        "while sending the request",
        lambda exc: isinstance(getattr(exc, "reason", None), BaseException),
    ),
    _http_client("InvalidURL", Meaning.REFUSED, "http.client refuses to send the request"),
    _http_client(
        "BadStatusLine RemoteDisconnected IncompleteRead LineTooLong UnknownProtocol"
        " UnknownTransferEncoding",
        Meaning.IN_DOUBT,
        "no answer, an incomplete answer, or an answer that is not HTTP",
    ),
    _os_error(
        Meaning.NOT_SENT,
        "raised in http.client while connecting",
        lambda exc: _in_http_client(exc) and before_the_request(exc),
    ),
    _os_error(
        Meaning.IN_DOUBT,
        "raised in http.client: a reset or a timeout after the request was sent",
        _in_http_client,
    ),
    _NO_CONNECTION,
    _urllib3(
        "MaxRetryError ProxyError SSLError ProtocolError",
        Meaning.REFUSED,
        UNTRUSTED,
        can_never_be_sent,
    ),
    _urllib3(
        "MaxRetryError ProxyError SSLError ProtocolError TimeoutError ReadTimeoutError",
        Meaning.NOT_SENT,
        NOT_CONNECTED,
        nothing_was_sent,
    ),
    _urllib3("EmptyPoolError", Meaning.NOT_SENT, "no free connection", is_first_attempt),
    _urllib3(
        "LocationValueError LocationParseError URLSchemeUnknown ProxySchemeUnknown",
        Meaning.REFUSED,
        "urllib3 refuses to send the request",
    ),
    _urllib3("InvalidHeader", Meaning.IN_DOUBT, "a header of the answer cannot be read"),
    _urllib3("ResponseNotChunked", None, "the provider answered; the task read it wrongly"),
    _urllib3(
        "MaxRetryError ProxyError SSLError ProtocolError TimeoutError ReadTimeoutError"
        " IncompleteRead InvalidChunkLength NewConnectionError NameResolutionError"
        " ConnectTimeoutError EmptyPoolError",
        Meaning.IN_DOUBT,
        "a reset, a timeout or an incomplete answer after the first byte was sent, in the last"
        " attempt or in an earlier attempt of urllib3",
    ),
)


#: Functions that follow a redirect, with the local variable that they set when they do so. ``None``
#: = each call of the function follows a redirect.
_FOLLOWING = {
    ("urllib.request", "http_error_302"): None,
    ("requests.sessions", "resolve_redirects"): None,  # requests wraps only some errors of urllib3
    ("urllib3.poolmanager", "urlopen"): "response",
    ("urllib3.connectionpool", "urlopen"): "redirect_location",
}


def _was_redirected(exc: BaseException) -> bool:
    for module, function, frame in frames(exc):
        variable = _FOLLOWING.get((module, function), "")
        if variable is None or frame.f_locals.get(variable):
            return True
    return False


def urllib_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Return a classifier for the errors of urllib.request, http.client and urllib3.

    urllib.request itself raises an error for an error status. With urllib3 and http.client, the
    task must check the status.

    Args:
        idempotent: ``True`` = a second call does no harm, so a failure after the request was sent
            is retried, and ``on_not_processed`` is not called. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Set it only if no
            gateway sends a 503 after it has passed the request on to the provider. Default
            ``False``: the failure is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors("urllib", RULES, idempotent, trust_503, _was_redirected)
