"""What do the errors of requests mean? https://requests.readthedocs.io"""

from __future__ import annotations

from ..outcomes import Classifier
from .answers import read_answer
from .exchange import Finding, LibraryErrors, Meaning, Rule
from .traces import entered
from .urllib import nothing_was_sent

__all__ = ["RULES", "requests_errors"]

_MODULE = "requests.exceptions"


def _answered(exc: BaseException) -> Finding | None:
    return read_answer(getattr(exc, "response", None))


RULES: tuple[Rule, ...] = (
    Rule(_MODULE, "HTTPError", _answered, "its status decides"),
    Rule(_MODULE, "ConnectTimeout", Meaning.NOT_SENT, "no connection in time"),
    Rule(
        _MODULE,
        "ConnectionError ProxyError SSLError Timeout",
        Meaning.NOT_SENT,
        "DNS, a refused connection, a proxy's tunnel or the TLS handshake",
        nothing_was_sent,
    ),
    Rule(
        _MODULE,
        "ConnectionError ProxyError SSLError Timeout ReadTimeout ChunkedEncodingError RetryError",
        Meaning.IN_DOUBT,
        "reset, silence or half an answer after the request began to leave; retries of urllib3 that"
        " ended with a status",
    ),
    Rule(_MODULE, "JSONDecodeError", None, "the answer came, but it is not JSON"),
    Rule(
        _MODULE,
        "InvalidURL InvalidProxyURL InvalidSchema MissingSchema URLRequired InvalidHeader"
        " InvalidJSONError",
        Meaning.REFUSED,
        "requests would not send it",
    ),
)


def _redirected(exc: BaseException) -> bool:
    history = getattr(getattr(exc, "response", None), "history", None) or ()
    # 307 and 308 pass the request on undone (RFC 9110, 15.4.8 and 15.4.9).
    return any(response.status_code not in (307, 308) for response in history) or (
        "resolve_redirects" in entered(exc, "requests.sessions")
    )


def requests_errors(*, idempotent: bool = False) -> Classifier:
    """Classify the errors of requests; a status only becomes one by ``raise_for_status()``.

    Arguments:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request left is RETRYABLE. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors(
        name="requests", rules=RULES, idempotent=idempotent, redirected=_redirected
    )
