"""Decide which errors of the mail provider lead to a retry."""

from __future__ import annotations

from urllib.error import HTTPError, URLError

from celery_sqs_backoff import Outcome, Verdict

#: With these statuses, the provider says that it has not sent the mail, but may send it later.
COME_BACK_LATER = {429, 503}


def provider_errors(exc: BaseException) -> Outcome | Verdict | None:
    """Classify an error of ``urllib.request.urlopen``. Return ``None`` for any other error.

    The question is always whether the mail may have been sent. The worker retries only if the mail
    was certainly not sent.
    """
    if isinstance(exc, HTTPError):
        if exc.code in COME_BACK_LATER:
            return Verdict(Outcome.RETRYABLE, retry_after=_retry_after(exc))
        if 400 <= exc.code < 500:  # the provider will refuse this request tomorrow too
            return Outcome.NOT_PROCESSED
        return Outcome.UNKNOWN  # for example, a gateway answers 502, but the mail may be sent
    if isinstance(exc, URLError) and isinstance(exc.reason, ConnectionRefusedError):
        return Outcome.RETRYABLE
    if isinstance(exc, OSError):  # for example a timeout, but the request may have arrived
        return Outcome.UNKNOWN
    return None


def _retry_after(exc: HTTPError) -> float | None:
    """Return the seconds of the Retry-After header. None without one, or if it is a date."""
    value = exc.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
