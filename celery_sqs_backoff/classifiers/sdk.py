"""What do the errors of a provider's own SDK mean, if they carry an HTTP status?

Stripe (``http_status``), SendGrid (``status_code``), Twilio (``status``) and many others; headers
are read if there are any. https://docs.stripe.com/error-handling
"""

from __future__ import annotations

import time

from ..outcomes import Classifier
from . import aiohttp, httpx, requests, urllib
from .answers import answer, read_answer
from .exchange import Finding, LibraryErrors, Rule, find

__all__ = ["RULES", "sdk_errors"]

_STATUSES = ("http_status", "status_code", "status")

_HTTP_RULES = (*requests.RULES, *httpx.RULES, *aiohttp.RULES, *urllib.RULES)


def _answered(exc: BaseException) -> Finding | None:
    for name in _STATUSES:
        if (status := getattr(exc, name, None)) is not None:
            return answer(status, getattr(exc, "headers", None), now=time.time())
    return read_answer(getattr(exc, "response", None))


def _cause(exc: BaseException) -> Finding | None:
    return None if exc.__cause__ is None else find(_HTTP_RULES, exc.__cause__)


def _is_an_sdk_s(exc: BaseException) -> bool:
    # An HTTP library's own error has more to say than its status.
    return not any(rule.fits(exc) for rule in _HTTP_RULES)


RULES: tuple[Rule, ...] = (
    Rule("stripe", "APIConnectionError", _cause, "as the error of the HTTP library it wraps"),
    Rule(
        "builtins",
        "Exception",
        _answered,
        "with `http_status`, `status_code`, `status` or a `response`, and not of a library above:"
        " its status decides",
        _is_an_sdk_s,
    ),
)


def sdk_errors(*, idempotent: bool = False) -> Classifier:
    """Classify errors by the HTTP status they carry, whatever their class.

    SDKs that let the errors of their HTTP library through (SendGrid: urllib; Twilio: requests) need
    that library's classifier beside this one.

    Arguments:
        idempotent: ``True`` = the call may be made twice without harm (an idempotency key, say), so
            a failure after the request left is RETRYABLE. Default ``False``: it is UNKNOWN.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors(name="sdk", rules=RULES, idempotent=idempotent)
