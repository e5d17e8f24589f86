"""What classifiers read from an HTTP response: the meaning of its status, and a time to wait."""

from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.classifiers.answers import answer, read_asked_seconds
from celery_sqs_backoff.classifiers.exchange import Diagnosis, Meaning
from celery_sqs_backoff.retry.outcomes import Outcome, Verdict
from tests.support.cases import cases

#: 1994-11-06 08:49:37 GMT, the example of RFC 9110.
NOW = 784111777.0


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        *((status, Meaning.REFUSED) for status in (400, 401, 402, 403, 404, 405, 410, 422)),
        *((status, Meaning.REFUSED_FOR_NOW) for status in (408, 421, 423, 425)),
        *(
            (status, Meaning.IN_DOUBT)
            for status in (409, 460, 499, 500, 502, 504, 507, 520, 522, 524, 599)
        ),
        (503, Meaning.UNAVAILABLE),
        *((status, Meaning.REFUSED) for status in (501, 505)),
        *((status, Meaning.NOT_SENT) for status in (521, 523, 525, 526)),
    ],
)
def test_status(status, meaning):
    """Each error status has a meaning."""
    assert answer(status, now=NOW) == Diagnosis(meaning)


def test_429_without_time():
    """A 429 that names no time to wait is a refusal for now.

    It shows that the provider is up and gets too many calls, so workers call it more slowly.
    """
    assert answer(429, now=NOW) == Diagnosis(Meaning.REFUSED_FOR_NOW, 0.0)


@pytest.mark.parametrize("status", [None, "503", True, 0, 100, 200, 204, 302, 399, 600, 5.03])
def test_status_without_error(status):
    """``answer`` returns None for a status that is no HTTP error."""
    assert answer(status, {"Retry-After": "1"}, now=NOW) is None


@cases(
    "headers seconds",
    {
        "seconds": ({"Retry-After": "120"}, 120),
        "any case, spaces": ({"retry-after": " 120 "}, 120),
        "zero is not absent": ({"Retry-After": "0"}, 0),
        "a fraction": ({"Retry-After": "1.5"}, 1.5),
        "date": ({"Retry-After": "Sun, 06 Nov 1994 08:50:37 GMT"}, 60),
        "RFC 850 date": ({"Retry-After": "Sunday, 06-Nov-94 08:50:37 GMT"}, 60),
        "asctime date": ({"Retry-After": "Sun Nov  6 08:50:37 1994"}, 60),
        "date in the past": ({"Retry-After": "Sun, 06 Nov 1994 08:49:07 GMT"}, 0),
        "negative": ({"Retry-After": "-5"}, None),
        "beyond a float": ({"Retry-After": "9" * 400}, None),
        "words": ({"Retry-After": "soon"}, None),
        "empty": ({"Retry-After": ""}, None),
        "no such year": ({"Retry-After": "Sun, 06 Nov 99999 08:50:37 GMT"}, None),
        "empty headers": ({}, None),
        "no headers": (None, None),
        "headers as text": ("Retry-After: 5", None),
        "no calls left": ({"RateLimit-Remaining": "0", "RateLimit-Reset": "30"}, 30),
        "some calls left": ({"RateLimit-Remaining": "7", "RateLimit-Reset": "30"}, None),
        "a reset alone": ({"RateLimit-Reset": "30"}, None),
        "the older names": ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "30"}, 30),
        "Retry-After comes first": (
            {"Retry-After": "5", "RateLimit-Remaining": "0", "RateLimit-Reset": "30"},
            5,
        ),
    },
)
def test_how_long_to_wait(headers, seconds):
    """The time to wait is read from ``Retry-After``, or else from the headers of a rate limit."""
    assert read_asked_seconds(headers, now=NOW) == seconds


@pytest.mark.parametrize("reset", ["1700000060", "1700000060000"], ids=["seconds", "milliseconds"])
def test_reset_time(reset):
    """A rate limit's reset may be a Unix time instead of a number of seconds to wait."""
    headers = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset}
    assert read_asked_seconds(headers, now=1_700_000_000.0) == 60


def test_429_with_reset():
    """A 429 asks for a wait until its reset time, even if it does not say how many calls remain."""
    headers = {"RateLimit-Reset": "30"}
    assert answer(429, headers, now=NOW) == Diagnosis(Meaning.REFUSED_FOR_NOW, 30)
    assert answer(503, headers, now=NOW) == Diagnosis(Meaning.UNAVAILABLE)


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "60"},
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "60"},
    ],
)
def test_refusal_with_wait(headers):
    """A 403 or 413 that asks for a wait is a refusal for now.

    GitHub sends 403 for its rate limits. RFC 9110, 15.5.14 allows ``Retry-After`` with 413.
    """
    for status in (403, 413):
        assert answer(status, headers, now=NOW) == Diagnosis(Meaning.REFUSED_FOR_NOW, 60)
    assert answer(409, headers, now=NOW) == Diagnosis(Meaning.IN_DOUBT, 60)


def test_503_with_retry_after():
    """A 503 is a refusal for now only if it has a valid ``Retry-After`` header.

    Headers of a rate limit prove nothing. Envoy, a proxy, adds them to all responses, even to its
    own 503 for a request that the provider has received.
    https://www.envoyproxy.io/docs/envoy/latest/api-v3/extensions/filters/http/ratelimit/v3/rate_limit.proto
    """
    believed = answer(503, {"Retry-After": "60"}, now=NOW)
    assert believed == Diagnosis(Meaning.REFUSED_FOR_NOW, 60)
    last_of_its_window = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "60"}
    assert answer(503, last_of_its_window, now=NOW) == Diagnosis(Meaning.UNAVAILABLE, 60)
    unreadable = {**last_of_its_window, "Retry-After": "soon"}
    assert answer(503, unreadable, now=NOW) == Diagnosis(Meaning.UNAVAILABLE, 60)


@pytest.mark.parametrize(
    ("headers", "meaning"),
    [
        ({"Server": "Varnish", "Retry-After": "5", "X-Varnish": "32770"}, Meaning.UNAVAILABLE),
        ({"Server": "Varnish", "Retry-After": "0", "Via": "1.1 varnish"}, Meaning.UNAVAILABLE),
        ({"Retry-After": "3", "Via": "1.1 varnish", "X-Varnish": "1"}, Meaning.REFUSED_FOR_NOW),
        ({"Server": "istio-envoy", "X-Envoy-Upstream-Service-Time": "9"}, Meaning.UNAVAILABLE),
    ],
    ids=["Varnish", "Fastly", "a provider behind Varnish", "Istio"],
)
def test_503_of_gateway(headers, meaning):
    """A 503 that a gateway made itself is no refusal, even with ``Retry-After``.

    Varnish, a gateway, answers 503 with ``Retry-After: 5`` even if the provider got the request.
    """
    found = answer(503, headers, now=NOW)
    assert found is not None
    assert found.meaning is meaning


def test_stdlib_headers():
    """``Retry-After`` is also read from the standard library's ``Message`` headers."""
    headers = Message()
    headers["Retry-After"] = "3"
    assert read_asked_seconds(headers, now=NOW) == 3


@given(
    status=st.integers(-10, 1000),
    name=st.sampled_from(
        ["Retry-After", "RateLimit", "RateLimit-Reset", "X-RateLimit-Reset", "RateLimit-Remaining"]
    ),
    value=st.one_of(st.text(max_size=40), st.integers().map(str), st.floats().map(str)),
)
def test_arbitrary_header(status, name, value):
    """``answer`` never raises, whatever status and headers a provider sends."""
    finding = answer(status, {name: value, "RateLimit-Remaining": "0"}, now=NOW)
    if finding is not None:
        assert isinstance(finding.verdict(idempotent=False), Verdict)
        assert finding.retry_after_seconds is None or finding.retry_after_seconds >= 0


@pytest.mark.parametrize(
    ("meaning", "outcome", "repeated", "trusting"),
    [
        (Meaning.NOT_SENT, Outcome.RETRYABLE, False, Outcome.RETRYABLE),
        (Meaning.REFUSED_FOR_NOW, Outcome.RETRYABLE, False, Outcome.RETRYABLE),
        (Meaning.REFUSED, Outcome.NOT_PROCESSED, False, Outcome.NOT_PROCESSED),
        (Meaning.IN_DOUBT, Outcome.UNKNOWN, True, Outcome.UNKNOWN),
        (Meaning.UNAVAILABLE, Outcome.UNKNOWN, True, Outcome.RETRYABLE),
        (Meaning.CONFLICT, Outcome.UNKNOWN, False, Outcome.UNKNOWN),
    ],
)
def test_verdict_of_diagnosis(meaning, outcome, repeated, trusting):
    """With ``idempotent=True``, a call in doubt is safe to repeat, and is still in doubt.

    So the worker retries the task, but does not undo its work.
    """
    finding = Diagnosis(meaning, 9)
    retried = outcome is Outcome.RETRYABLE
    assert finding.verdict(idempotent=False) == Verdict(outcome, 9 if retried else None)
    assert finding.verdict(idempotent=True) == Verdict(
        outcome, 9 if retried or repeated else None, safe_to_repeat=repeated
    )
    assert finding.verdict(idempotent=False, trust_503=True).outcome is trusting
