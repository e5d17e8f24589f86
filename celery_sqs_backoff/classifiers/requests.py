"""What do the errors of requests mean? https://requests.readthedocs.io"""

from __future__ import annotations

from typing import Any

from ..retry.outcomes import Classifier
from ..traces import list_functions, was_sent, was_tried_before
from .answers import answer, may_have_acted, read_answer
from .exchange import Diagnosis, ErrorRule, LibraryErrors, Meaning
from .urllib import never_to_be_sent, nothing_was_sent

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
        "its status decides; in doubt if urllib3's retries had left an attempt before it in doubt",
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
        "an untrusted certificate, or a proxy that wants credentials (407)",
        never_to_be_sent,
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
        "reset, silence or half an answer after the first byte left; retries of urllib3 that"
        " ended with a status",
    ),
    ErrorRule(_MODULE, "JSONDecodeError", None, "the answer came, but it is not JSON"),
    ErrorRule(
        _MODULE,
        "InvalidHeader",
        Meaning.REFUSED,
        "a header of ours that requests would not send",
        _while_preparing,
    ),
    ErrorRule(_MODULE, "InvalidHeader", Meaning.IN_DOUBT, "a header of the answer cannot be read"),
    ErrorRule(
        _MODULE,
        "InvalidURL InvalidProxyURL InvalidSchema MissingSchema URLRequired InvalidJSONError",
        Meaning.REFUSED,
        "requests would not send it",
    ),
)


def _was_redirected(exc: BaseException) -> bool:
    history = getattr(getattr(exc, "response", None), "history", None) or ()
    return any(map(may_have_acted, history)) or (
        "resolve_redirects" in list_functions(exc, "requests.sessions")
    )


def requests_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Classify the errors of requests. A status becomes an error only by ``raise_for_status()``.

    Args:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request left is retried without an undo. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE too. Set it if no gateway
            sends a bare 503 after it has passed the request on. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors("requests", RULES, idempotent, trust_503, _was_redirected)
