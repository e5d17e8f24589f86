"""Decide which errors of the mail provider are retried."""

from __future__ import annotations

from urllib.error import HTTPError, URLError

from celery_sqs_backoff import Outcome, Verdict

#: The provider says that it has not done it, and that it may do it later.
COME_BACK_LATER = {429, 503}


def provider_errors(exc: BaseException) -> Outcome | Verdict | None:
    """Classify an error of ``urllib.request.urlopen``, or return ``None`` for any other error.

    The question is always whether the mail can have been sent. Only a clear "no" is retried.
    """
    if isinstance(exc, HTTPError):
        if exc.code in COME_BACK_LATER:
            return Verdict(Outcome.RETRYABLE, retry_after=_retry_after(exc))
        if 400 <= exc.code < 500:  # it does not like the request, and will not like it tomorrow
            return Outcome.NOT_PROCESSED
        return Outcome.UNKNOWN  # a gateway's 502 or 504 does not say what happened behind it
    if isinstance(exc, URLError) and isinstance(exc.reason, ConnectionRefusedError):
        return Outcome.RETRYABLE
    if isinstance(exc, OSError):  # timeout, reset: the request may have arrived before it
        return Outcome.UNKNOWN
    return None


def _retry_after(exc: HTTPError) -> float | None:
    """Seconds that the provider asks us to wait (the other legal form, a date, is not read)."""
    value = exc.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
