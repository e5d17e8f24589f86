"""What do the errors of aiohttp's client mean?

https://docs.aiohttp.org/en/stable/client_reference.html#client-exceptions
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..retry.outcomes import Classifier
from ..traces import certificate_rejected, frames
from .answers import answer, may_have_acted
from .exchange import Finding, LibraryErrors, Meaning, Rule

__all__ = ["RULES", "aiohttp_errors"]


def _answered(exc: BaseException) -> Finding | None:
    return answer(getattr(exc, "status", None), getattr(exc, "headers", None), now=time.time())


def _was_not_http(exc: BaseException) -> bool:
    # aiohttp gives it the status 400, which no server has sent.
    return type(exc.__cause__).__module__ == "aiohttp.http_exceptions"


def _in_the_client(exc: BaseException) -> bool:
    return any(
        module in ("aiohttp.client", "aiohttp.client_reqrep") for module, _, _ in frames(exc)
    )


def _certificate(exc: BaseException) -> bool:
    inner = getattr(exc, "certificate_error", None)
    return inner is None or certificate_rejected(inner)


RULES: tuple[Rule, ...] = (
    Rule(
        "aiohttp",
        "ClientHttpProxyError",
        Meaning.REFUSED,
        "the proxy wants credentials (407)",
        lambda exc: exc.status == 407,
    ),
    Rule("aiohttp", "ClientHttpProxyError", Meaning.NOT_SENT, "the proxy's tunnel was not opened"),
    Rule(
        "aiohttp",
        "ClientConnectorCertificateError ServerFingerprintMismatch",
        Meaning.REFUSED,
        "a certificate that is not to be trusted",
        _certificate,
    ),
    Rule(
        "aiohttp",
        "ClientResponseError",
        Meaning.IN_DOUBT,
        "the answer is not HTTP",
        _was_not_http,
    ),
    Rule("aiohttp", "TooManyRedirects", None, "a redirect may be an answer"),
    Rule(
        "aiohttp",
        "ClientResponseError ContentTypeError WSServerHandshakeError",
        _answered,
        "its status decides",
    ),
    Rule(
        "aiohttp",
        "ClientConnectorError ClientConnectorDNSError ClientProxyConnectionError ClientSSLError"
        " ClientConnectorSSLError ClientConnectorCertificateError ConnectionTimeoutError"
        " ServerFingerprintMismatch",
        Meaning.NOT_SENT,
        "DNS, a refused connection, none in time, the TLS handshake",
    ),
    Rule(
        "aiohttp.client_exceptions",
        "UnixClientConnectorError",
        Meaning.NOT_SENT,
        "no connection to a Unix socket",
    ),
    Rule(
        "aiohttp",
        "InvalidUrlRedirectClientError NonHttpUrlRedirectClientError",
        None,
        "a redirect to nowhere: the first server has answered",
    ),
    Rule(
        "aiohttp",
        "InvalidURL InvalidUrlClientError NonHttpUrlClientError",
        Meaning.REFUSED,
        "aiohttp would not send it",
    ),
    Rule(
        "aiohttp",
        "ServerTimeoutError",
        Meaning.NOT_SENT,
        "no connection in time, before aiohttp 3.10",
        lambda exc: str(exc).startswith("Connection timeout"),
    ),
    Rule(
        "aiohttp",
        "ClientConnectionError ClientConnectionResetError ClientOSError ServerConnectionError"
        " ServerDisconnectedError ServerTimeoutError SocketTimeoutError ClientPayloadError"
        " UploadAbortedError",
        Meaning.IN_DOUBT,
        "reset, silence or half an answer after the request began to leave",
    ),
    Rule(
        "asyncio",
        "TimeoutError",
        Meaning.IN_DOUBT,
        "raised in aiohttp: the total timeout, wherever the call was",
        _in_the_client,
    ),
)


def _sent_before(local: Mapping[str, Any]) -> bool:
    """Has aiohttp repeated a PUT or DELETE by itself, whose connection ended without an answer?"""
    return (
        local.get("method") in ("PUT", "DELETE")
        and local.get("retry_persistent_connection") is False
        and getattr(local.get("self"), "_retry_connection", False)
    )


def _redirected(exc: BaseException) -> bool:
    history = getattr(exc, "history", None)
    for module, function, frame in frames(exc):
        if (module, function) == ("aiohttp.client", "_request"):
            if _sent_before(frame.f_locals):
                return True
            history = history or frame.f_locals.get("history")  # most errors have none
    return any(map(may_have_acted, history or ()))


def aiohttp_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Classify the errors of aiohttp's client; a status needs ``raise_for_status``.

    Arguments:
        idempotent: ``True`` = the call may be made twice without harm, so a failure after the
            request left is retried, and nothing is undone. Default ``False``: it is not.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE too: no gateway answers so
            after it has passed the request on. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors(
        name="aiohttp",
        rules=RULES,
        idempotent=idempotent,
        trust_503=trust_503,
        redirected=_redirected,
    )
