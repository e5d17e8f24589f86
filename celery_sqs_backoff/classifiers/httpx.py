"""Classify the errors of httpx. https://www.python-httpx.org/exceptions/"""

from __future__ import annotations

from functools import partial

from ..retry.outcomes import Classifier
from ..traces import certificate_rejected, frames
from .answers import may_have_acted, read_answer
from .exchange import NOT_CONNECTED, UNTRUSTED, ErrorRule, LibraryErrors, Meaning

_rule = partial(ErrorRule, "httpx")


def _certificate(exc: BaseException) -> bool:
    # The ``__cause__`` of httpx's error is httpcore's error. The ``__context__`` of that error is
    # the original error, for example an error of the module ``ssl``.
    root = getattr(exc.__cause__, "__context__", None)
    return certificate_rejected(exc) or (root is not None and certificate_rejected(root))


RULES: tuple[ErrorRule, ...] = (
    _rule("HTTPStatusError", lambda exc: read_answer(exc.response), "its status decides"),
    _rule(
        "ConnectError ProxyError",
        Meaning.REFUSED,
        UNTRUSTED,
        lambda exc: _certificate(exc) or str(exc).startswith("407"),
    ),
    _rule("ConnectError ConnectTimeout PoolTimeout ProxyError", Meaning.NOT_SENT, NOT_CONNECTED),
    _rule("UnsupportedProtocol InvalidURL", Meaning.REFUSED, "httpx refuses to send the request"),
    _rule(
        "TimeoutException ReadTimeout WriteTimeout NetworkError ReadError WriteError CloseError"
        " RemoteProtocolError",
        Meaning.IN_DOUBT,
        "a reset, a timeout, an incomplete answer or one that is not HTTP, after the first byte"
        " was sent",
    ),
)


def _was_redirected(exc: BaseException) -> bool:
    history = getattr(getattr(exc, "response", None), "history", None)
    for module, function, frame in frames(exc):
        if (module, function) == ("httpx._client", "_send_handling_redirects"):
            # An error without a response has no ``history``. Read it from the traceback instead.
            history = history or frame.f_locals.get("history")
    return any(map(may_have_acted, history or ()))


def httpx_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Return a classifier for the errors of httpx.

    httpx raises an error for a status only if the task calls ``raise_for_status()``.

    Args:
        idempotent: ``True`` = a second call does no harm, so a failure after the request was sent
            is retried, and ``on_not_processed`` is not called. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Set it only if no
            gateway sends a 503 after it has passed the request on to the provider. Default
            ``False``: the failure is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    return LibraryErrors("httpx", RULES, idempotent, trust_503, _was_redirected)
