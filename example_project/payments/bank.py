"""Call the bank over HTTP.

A rollback in our database does not undo the bank's work. The bank does a request only once for each
idempotency key. If we repeat the request, it sends the same response again.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from django.conf import settings

from celery_sqs_backoff import NonRetryable, Outcome, Verdict

TIMEOUT_SECONDS = 5


class BankSaysNo(NonRetryable):
    """The bank has understood the request, and will not do it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the bank refuses: {what}", not_processed=True)


class NoAnswer(Exception):
    """We do not know whether the bank has done the request. We may repeat it with the same key."""


def what_it_means(exc: BaseException) -> Verdict | None:
    """Classify an error of the bank. Tasks have this as their option ``classify``."""
    return Verdict(Outcome.UNKNOWN, safe_to_repeat=True) if isinstance(exc, NoAnswer) else None


def open_account(customer: str, key: str) -> str:
    """Open an account, and return its number."""
    return str(_ask("accounts", key, customer=customer)["account"])


def release(account: str, amount: str, key: str) -> str:
    """Release an amount to an account, and return the bank's reference."""
    return str(_ask("releases", key, account=account, amount=amount)["reference"])


def take_back(reference: str, key: str) -> None:
    _ask("returns", key, reference=reference)


def _ask(what: str, key: str, **body: Any) -> dict[str, Any]:
    request = Request(
        f"{settings.BANK_URL}/{what}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": key},
    )
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except HTTPError as exc:
        if exc.code == 422:
            raise BankSaysNo(what) from exc
        raise NoAnswer(f"the bank answered {exc.code}") from exc
    except OSError as exc:
        raise NoAnswer("no answer from the bank") from exc
