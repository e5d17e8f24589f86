"""Classify the errors of requests. https://requests.readthedocs.io"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..retry.outcomes import Classifier
from ..traces import list_functions, was_sent
from .answers import answer, may_have_acted, read_answer
from .exchange import UNTRUSTED, Diagnosis, ErrorRule, LibraryErrors, Meaning
from .urllib import can_never_be_sent, is_first_attempt, nothing_was_sent

_rule = partial(ErrorRule, "requests.exceptions")


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


RULES: tuple[ErrorRule, ...] = (
    _rule(
        "HTTPError",
        _read_status,
        "by its status; in doubt if urllib3 had made an earlier attempt that is in doubt",
    ),
    _rule("ConnectTimeout", Meaning.NOT_SENT, "no connection in time", is_first_attempt),
    _rule("ConnectionError ProxyError SSLError", Meaning.REFUSED, UNTRUSTED, can_never_be_sent),
    _rule(
        "ConnectionError ProxyError SSLError Timeout",
        Meaning.NOT_SENT,
        "DNS, a refused connection, a proxy's tunnel or the TLS handshake",
        nothing_was_sent,
    ),
    _rule(
        "ConnectionError ProxyError SSLError Timeout ReadTimeout ChunkedEncodingError RetryError",
        Meaning.IN_DOUBT,
        "a reset, a timeout or an incomplete answer after the first byte was sent; urllib3's"
        " retries, if the last attempt ended with an error status",
    ),
    _rule("JSONDecodeError", None, "the provider answered, but not with JSON"),
    _rule(
        "InvalidHeader",
        Meaning.REFUSED,
        "requests refuses to send a header of the request",
        lambda exc: any(n.startswith("prepare") for n in list_functions(exc, "requests.models")),
    ),
    _rule("InvalidHeader", Meaning.IN_DOUBT, "a header of the answer cannot be read"),
    _rule(
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
        idempotent: ``True`` = a second call does no harm, so a failure after the request was sent
            is retried, and ``on_not_processed`` is not called. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Set it only if no
            gateway sends a 503 after it has passed the request on to the provider. Default
            ``False``: the failure is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors("requests", RULES, idempotent, trust_503, _was_redirected)
