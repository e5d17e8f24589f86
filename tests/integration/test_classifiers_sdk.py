"""The classifiers know the real errors of the SDKs of Stripe, SendGrid and Twilio.

A failed call is *in doubt* if the server may have acted. Its outcome is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sendgrid
import stripe
from twilio.base.exceptions import TwilioRestException
from twilio.http.http_client import TwilioHttpClient
from twilio.rest import Client as TwilioClient

from celery_sqs_backoff.classifiers import (
    known_errors,
    requests_errors,
    sdk_errors,
    urllib_errors,
)
from celery_sqs_backoff.retry.outcomes import Classifier, Outcome, Verdict
from tests.support.http_faults import (
    answer,
    close,
    hang,
    http_faults,
    nobody,
    reset,
)
from tests.support.verdicts import REPEATED, raised, shown

RETRYABLE, NOT_PROCESSED, UNKNOWN = Outcome.RETRYABLE, Outcome.NOT_PROCESSED, Outcome.UNKNOWN

TIMEOUT_SECONDS = 0.25


def by_stripe(url: str) -> None:
    client = stripe.StripeClient(
        "sk_test_nothing",
        base_addresses={"api": url},
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=TIMEOUT_SECONDS),
    )
    client.v1.customers.create({"email": "a@example.com"})


def by_sendgrid(url: str) -> None:
    client = sendgrid.SendGridAPIClient("SG.nothing", host=url)
    client.client.timeout = TIMEOUT_SECONDS
    client.send({"personalizations": []})


class _HttpClient(TwilioHttpClient):
    """Twilio's own client, which calls this machine. The SDK has no setting for that."""

    def __init__(self, url: str) -> None:
        super().__init__(timeout=TIMEOUT_SECONDS)
        self.local_url = url

    def request(self, method: str, url: str, *args: Any, **options: Any) -> Any:
        return super().request(method, f"{self.local_url}/messages", *args, **options)


def by_twilio(url: str) -> None:
    client = TwilioClient("AC00", "nothing", http_client=_HttpClient(url))
    client.messages.create(to="+10000000000", from_="+10000000001", body="hello")


Call = Callable[[str], None]
every_sdk = pytest.mark.parametrize(
    "call", [by_stripe, by_sendgrid, by_twilio], ids=lambda call: call.__name__[3:]
)


@pytest.fixture(scope="module")
def provider():
    with http_faults() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_seen(provider):
    provider.seen = 0


def outcomes(exc: Exception, errors: Callable[..., Classifier]) -> tuple[Outcome | str | None, ...]:
    """Return the outcome by default, and the outcome if the task is idempotent."""
    found = tuple(errors(idempotent=idempotent)(exc) for idempotent in (False, True))
    return tuple(map(shown, found))


@every_sdk
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, (NOT_PROCESSED, NOT_PROCESSED)),
        (401, (NOT_PROCESSED, NOT_PROCESSED)),
        (404, (NOT_PROCESSED, NOT_PROCESSED)),
        (409, (UNKNOWN, REPEATED)),
        (429, (RETRYABLE, RETRYABLE)),
        (500, (UNKNOWN, REPEATED)),
        (499, (UNKNOWN, REPEATED)),
        (503, (UNKNOWN, REPEATED)),
    ],
)
def test_status(call, provider, status, expected):
    """The status of the SDK's error decides the outcome."""
    provider.behave = answer(status, b'{"error": {"message": "no"}}')
    exc = raised(call, provider.url)
    assert provider.seen == 1
    assert outcomes(exc, sdk_errors) == expected
    assert outcomes(exc, known_errors) == expected


@pytest.mark.parametrize("call", [by_stripe, by_sendgrid], ids=lambda call: call.__name__[3:])
def test_retry_after(call, provider):
    """The delay of the retry is at least the Retry-After of the response."""
    provider.behave = answer(429, b'{"error": {"message": "no"}}', Retry_After="11")
    assert sdk_errors()(raised(call, provider.url)) == Verdict(RETRYABLE, retry_after=11)


def test_twilio_without_headers(provider):
    """Twilio's error has no headers, so the delay ignores the Retry-After of the response."""
    provider.behave = answer(429, b"{}", Retry_After="11")
    exc = raised(by_twilio, provider.url)
    assert isinstance(exc, TwilioRestException)
    assert sdk_errors()(exc) == Verdict(RETRYABLE, 0)


def test_stripe_refused_connection():
    """Stripe's error for a refused connection gives RETRYABLE."""
    exc = raised(by_stripe, f"http://{nobody()}")
    assert isinstance(exc, stripe.APIConnectionError)
    assert outcomes(exc, sdk_errors) == (RETRYABLE, RETRYABLE)


@pytest.mark.parametrize("behaviour", [reset, close, hang], ids=lambda b: b.__name__)
def test_stripe_lost_answer(provider, behaviour):
    """A call is in doubt if Stripe's error says that the response was lost."""
    provider.behave = behaviour
    exc = raised(by_stripe, provider.url)
    assert isinstance(exc, stripe.APIConnectionError)
    assert provider.seen == 1
    assert outcomes(exc, sdk_errors) == (UNKNOWN, REPEATED)


@pytest.mark.parametrize(
    ("call", "errors"),
    [(by_sendgrid, urllib_errors), (by_twilio, requests_errors)],
    ids=["sendgrid", "twilio"],
)
def test_error_passed_through(call, errors, provider):
    """If an SDK passes on the errors of an HTTP library, that library's classifier is needed."""
    refused = raised(call, f"http://{nobody()}")
    provider.behave = reset
    cut = raised(call, provider.url)

    assert outcomes(refused, sdk_errors) == outcomes(cut, sdk_errors) == (None, None)
    assert outcomes(refused, errors) == (RETRYABLE, RETRYABLE)
    assert outcomes(cut, errors) == (UNKNOWN, REPEATED)


def test_error_around_library_error():
    """The classifier ignores the cause of an error that the task itself has raised.

    The task may have done work before. So only errors that an SDK has wrapped count.
    """

    def call(url):
        try:
            by_twilio(url)
        except OSError as exc:
            raise RuntimeError("the second half failed") from exc

    assert outcomes(raised(call, f"http://{nobody()}"), known_errors) == (None, None)


def test_stripe_refused_after_retry(provider):
    """A call is in doubt if the second attempt of Stripe's SDK finds no connection.

    The first attempt has reached the server, which then stopped.
    """
    with http_faults() as dying:
        client = stripe.StripeClient(
            "sk_test_nothing",
            base_addresses={"api": dying.url},
            max_network_retries=1,
            http_client=stripe.RequestsClient(timeout=TIMEOUT_SECONDS),
        )
        dying.behave = lambda handler: dying.stop_listening()
        exc = raised(lambda _: client.v1.customers.create({"email": "a@example.com"}), "")
        assert dying.seen == 1
    assert isinstance(exc, stripe.APIConnectionError)
    assert outcomes(exc, sdk_errors) == (UNKNOWN, REPEATED)
    assert outcomes(exc, known_errors) == (UNKNOWN, REPEATED)


def test_stripe_reused_key(provider):
    """A call is in doubt if its idempotency key was used for another request to Stripe.

    That request may have charged the customer. A retry would get the same error.
    """
    provider.behave = answer(400, b'{"error": {"type": "idempotency_error", "message": "no"}}')
    exc = raised(by_stripe, provider.url)
    assert isinstance(exc, stripe.IdempotencyError)
    assert outcomes(exc, sdk_errors) == (UNKNOWN, UNKNOWN)
