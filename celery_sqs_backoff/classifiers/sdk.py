"""Classify the errors of providers' own SDKs by the HTTP status in the error.

Only errors of known SDKs are read, because other exceptions may have a ``status_code``, too. For
example, a task may raise the ValidationError of Django REST framework after the provider has
charged the customer. Its status 400 would read as if the provider had refused the call.
https://docs.stripe.com/error-handling
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from ..retry.outcomes import Classifier
from ..traces import had_sent_other_mails, was_tried_before
from . import httpx, requests, urllib
from .answers import answer, read_answer
from .exchange import Diagnosis, ErrorRule, LibraryErrors, Meaning, find

#: Top-level modules of the known SDKs.
MODULES = ("anymail", "python_http_client", "sendgrid", "slack_sdk", "stripe", "twilio")

_STATUSES = ("http_status", "status_code", "status")

_HTTP_RULES = (*requests.RULES, *httpx.RULES, *urllib.RULES)


def _read_status(exc: BaseException) -> Diagnosis | None:
    response = getattr(exc, "response", None)
    for name in _STATUSES:
        if (status := getattr(exc, name, None)) is not None:
            headers = getattr(exc, "headers", None) or getattr(response, "headers", None)
            return answer(status, headers, now=time.time())
    return read_answer(response)


def _cause(exc: BaseException) -> Diagnosis | None:
    diagnosis = None if exc.__cause__ is None else find(_HTTP_RULES, exc.__cause__)
    if diagnosis is not None and was_tried_before(exc):
        return Diagnosis(Meaning.IN_DOUBT, diagnosis.retry_after_seconds)
    return diagnosis


#: The rules for errors of the SDKs. A connection error without a ``__cause__``, as in stripe before
#: version 9, is not classified.
RULES: tuple[ErrorRule, ...] = (
    ErrorRule(
        "builtins",
        "Exception",
        Meaning.IN_DOUBT,
        "django-anymail in `send_mass_mail`: earlier mails of the call were accepted",
        lambda exc: type(exc).__module__.startswith("anymail.") and had_sent_other_mails(exc),
    ),
    ErrorRule(
        "stripe",
        "APIConnectionError",
        _cause,
        "as the wrapped error of the HTTP library; in doubt if an earlier attempt of stripe"
        " (`max_network_retries`) had sent the request",
    ),
    ErrorRule(
        "stripe",
        "IdempotencyError",
        Meaning.CONFLICT,
        "the key was used for another request, which may have been processed",
    ),
    ErrorRule(
        "builtins",
        "Exception",
        _read_status,
        "an error of one of the SDKs with `http_status`, `status_code`, `status` or a `response`:"
        " by its status",
    ),
)


def sdk_errors(
    *, idempotent: bool = False, trust_503: bool = False, modules: Iterable[str] = ()
) -> Classifier:
    """Return a classifier for errors of providers' SDKs, by the HTTP status in the error.

    The classifier reads errors of Stripe (``http_status``), SendGrid (``status_code``), Twilio
    (``status``), Slack and django-anymail (``response``). SendGrid's SDK also raises errors of
    urllib, so a task that calls it also needs ``urllib_errors``. Twilio's SDK also raises errors of
    requests, so a task that calls it also needs ``requests_errors``.

    Stripe's client repeats a call, by default twice, and reports only the last failure. If this
    failure has a status, the classifier reads only that, although an earlier attempt may have been
    processed. So give the client ``max_network_retries=0``, or pass an idempotency key of your own
    and set ``idempotent=True``.

    Args:
        idempotent: ``True`` = the call may be made twice without harm, for example because of an
            idempotency key. So a failure after the request was sent is retried, and
            ``on_not_processed`` is not called. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Default ``False``.
        modules: top-level modules of further SDKs, such as ``("acme_payments",)``.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool, or ``modules`` is a string.
    """
    if isinstance(modules, str):
        raise TypeError(f"invalid modules {modules!r}: expected a list of names")
    known = {*MODULES, *modules}

    def is_an_sdks(exc: BaseException) -> bool:
        return type(exc).__module__.partition(".")[0] in known

    rules = (*RULES[:-1], replace(RULES[-1], applies=is_an_sdks))
    return LibraryErrors("sdk", rules, idempotent, trust_503)
