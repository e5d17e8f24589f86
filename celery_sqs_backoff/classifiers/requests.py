"""Classify the errors of requests. https://requests.readthedocs.io"""

from __future__ import annotations

from typing import Any

from ..retry.outcomes import Classifier
from ..traces import list_functions, was_sent, was_tried_before
from .answers import answer, may_have_acted, read_answer
from .exchange import Diagnosis, ErrorRule, LibraryErrors, Meaning
from .urllib import can_never_be_sent, nothing_was_sent

_MODULE = "requests.exceptions"


def _read_status(exc: BaseException) -> Diagnosis | None:
    response = getattr(exc, "response", None)
    found = read_answer(response)
    retries = getattr(getattr(response, "raw", None), "retries", None)
    if found and any(map(_is_in_doubt, getattr(retries, "history", None) or ())):
        return Diagnosis(Meaning.IN_DOUBT, found.retry_after_seconds)
    return found


def _is_in_doubt(attempt: Any) -> bool:
    """Return whether the provider may have processed an attempt that urllib3 repeated."""
    found = answer(attempt.status, now=0.0)
    if found is None:
        return was_sent(attempt.error)
    return found.meaning in (Meaning.IN_DOUBT, Meaning.UNAVAILABLE)


def _while_preparing(exc: BaseException) -> bool:
    return any(name.startswith("prepare") for name in list_functions(exc, "requests.models"))


RULES: tuple[ErrorRule, ...] = (
    ErrorRule(
        _MODULE,
        "HTTPError",
        _read_status,
        "by its status; in doubt if urllib3 had made an earlier attempt that is in doubt",
    ),
    ErrorRule(
        _MODULE,
        "ConnectTimeout",
        Meaning.NOT_SENT,
        "no connection in time",
        lambda exc: not was_tried_before(exc),
    ),
    ErrorRule(
        _MODULE,
        "ConnectionError ProxyError SSLError",
        Meaning.REFUSED,
        "an untrusted certificate, or a proxy that requires credentials (407)",
        can_never_be_sent,
    ),
    ErrorRule(
        _MODULE,
        "ConnectionError ProxyError SSLError Timeout",
        Meaning.NOT_SENT,
        "DNS, a refused connection, a proxy's tunnel or the TLS handshake",
        nothing_was_sent,
    ),
    ErrorRule(
        _MODULE,
        "ConnectionError ProxyError SSLError Timeout ReadTimeout ChunkedEncodingError RetryError",
        Meaning.IN_DOUBT,
        "a reset, a timeout or an incomplete answer after the first byte was sent; retries of"
        " urllib3 that ended with a status",
    ),
    ErrorRule(_MODULE, "JSONDecodeError", None, "the provider answered, but not with JSON"),
    ErrorRule(
        _MODULE,
        "InvalidHeader",
        Meaning.REFUSED,
        "requests refuses to send a header of the request",
        _while_preparing,
    ),
    ErrorRule(_MODULE, "InvalidHeader", Meaning.IN_DOUBT, "a header of the answer cannot be read"),
    ErrorRule(
        _MODULE,
        "InvalidURL InvalidProxyURL InvalidSchema MissingSchema URLRequired InvalidJSONError",
        Meaning.REFUSED,
        "requests refuses to send the request",
    ),
)


def _was_redirected(exc: BaseException) -> bool:
    history = getattr(getattr(exc, "response", None), "history", None) or ()
    return any(map(may_have_acted, history)) or (
        "resolve_redirects" in list_functions(exc, "requests.sessions")
    )


def requests_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Return a classifier for the errors of requests.

    requests raises an error for a status only if the task calls ``raise_for_status()``.

    Args:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request was sent is retried without an undo. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Set it if no gateway
            before the provider sends this 503 after it has passed the request on. Default
            ``False``: the failure is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors("requests", RULES, idempotent, trust_503, _was_redirected)
