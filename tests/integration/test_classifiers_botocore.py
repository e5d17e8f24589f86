"""The classifier knows for botocore's real errors whether AWS may have done the work.

A failed call is *in doubt* if it may have been done. Its outcome is UNKNOWN. A task that is
idempotent repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import boto3
import botocore.session
import pytest
from botocore import exceptions
from botocore.config import Config
from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker

from celery_sqs_backoff.classifiers import botocore_errors, known_errors
from celery_sqs_backoff.classifiers.botocore import IN_PROGRESS_CODES, THROTTLING_CODES
from celery_sqs_backoff.retry.outcomes import Outcome, Verdict
from tests.support.cases import cases
from tests.support.http_faults import (
    Behaviour,
    answer,
    close,
    half,
    hang,
    http_faults,
    nobody,
    overflowing,
    reset,
    silent,
)
from tests.support.verdicts import REPEATED, raised, shown

RETRYABLE, NOT_PROCESSED, UNKNOWN = Outcome.RETRYABLE, Outcome.NOT_PROCESSED, Outcome.UNKNOWN

TIMEOUT_SECONDS = 0.25

SESSION = boto3.Session(
    region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
)


@pytest.fixture(scope="module")
def provider():
    with http_faults() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_seen(provider):
    provider.seen = 0


def send(endpoint: str, **config: Any) -> None:
    settings = {
        "connect_timeout": TIMEOUT_SECONDS,
        "read_timeout": TIMEOUT_SECONDS,
        "retries": {"total_max_attempts": 1},
    }
    client = SESSION.client("sqs", endpoint_url=endpoint, config=Config(**(settings | config)))
    client.send_message(QueueUrl=f"{endpoint}/1/mail", MessageBody="hello")


def aws_error(status: int, code: str, **headers: str) -> Behaviour:
    return answer(status, b'{"__type": "com.amazonaws.sqs#%s"}' % code.encode(), **headers)


def outcomes(exc: Exception) -> tuple[Outcome | str | None, ...]:
    """Return the outcome by default, and the outcome if the task is idempotent."""
    found = tuple(botocore_errors(idempotent=idempotent)(exc) for idempotent in (False, True))
    assert found == tuple(known_errors(idempotent=idempotent)(exc) for idempotent in (False, True))
    return tuple(map(shown, found))


#: Places where a call ends before its request leaves, and botocore's error.
NOT_SENT: dict[str, tuple[Callable[[], AbstractContextManager[str]], str, type[Exception]]] = {
    "refused connection": (
        lambda: nullcontext(nobody()),
        "http://{}",
        exceptions.EndpointConnectionError,
    ),
    "no such name": (
        lambda: nullcontext("sqs.invalid"),
        "http://{}",
        exceptions.EndpointConnectionError,
    ),
    "no connection in time": (overflowing, "http://{}", exceptions.ConnectTimeoutError),
    "silence in the handshake": (silent, "https://{}", exceptions.HTTPClientError),
}


@pytest.mark.parametrize(("place", "url", "error"), NOT_SENT.values(), ids=NOT_SENT.keys())
def test_nothing_was_sent(place, url, error):
    """A failure before the request leaves is retryable."""
    with place() as address:
        exc = raised(send, url.format(address))
    assert isinstance(exc, error)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)


def test_server_without_tls(provider):
    """A server that does not speak TLS gives RETRYABLE."""
    exc = raised(send, provider.url.replace("http:", "https:"))
    assert isinstance(exc, exceptions.SSLError)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)
    assert provider.seen == 0


def test_missing_proxy(provider):
    """A proxy that refuses connections gives RETRYABLE."""
    exc = raised(send, provider.url, proxies={"http": f"http://{nobody()}"})
    assert isinstance(exc, exceptions.ProxyConnectionError)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)


@pytest.mark.parametrize("behaviour", [reset, close, hang], ids=lambda b: b.__name__)
def test_no_proper_answer(provider, behaviour):
    """A call is in doubt if the server has got the request and not answered it."""
    provider.behave = behaviour
    exc = raised(send, provider.url)
    assert provider.seen == 1
    assert outcomes(exc) == (UNKNOWN, REPEATED)


def test_half_streamed_answer(provider):
    """A call is in doubt if only half of its streamed response arrives."""
    provider.behave = half
    body = SESSION.client("s3", endpoint_url=provider.url).get_object(Bucket="b", Key="k")["Body"]
    with pytest.raises(exceptions.ResponseStreamingError) as caught:
        body.read()
    assert outcomes(caught.value) == (UNKNOWN, REPEATED)


@cases(
    "status code expected",
    {
        "throttled": (400, "ThrottlingException", (RETRYABLE, RETRYABLE)),
        "arrived too slowly": (400, "RequestTimeout", (RETRYABLE, RETRYABLE)),
        "expired credentials": (403, "ExpiredToken", (RETRYABLE, RETRYABLE)),
        "bad credentials": (403, "InvalidClientTokenId", (NOT_PROCESSED, NOT_PROCESSED)),
        "mistake": (400, "InvalidParameterValue", (NOT_PROCESSED, NOT_PROCESSED)),
        "500": (500, "InternalError", (UNKNOWN, REPEATED)),
        "503": (503, "ServiceUnavailable", (RETRYABLE, RETRYABLE)),
        "504": (504, "GatewayTimeout", (UNKNOWN, REPEATED)),
    },
)
def test_code_or_status(provider, status, code, expected):
    """AWS's error code decides the outcome. If the code is not known, the status decides."""
    provider.behave = aws_error(status, code)
    exc = raised(send, provider.url)
    assert isinstance(exc, exceptions.ClientError)
    assert provider.seen == 1
    assert outcomes(exc) == expected


@pytest.mark.parametrize(("status", "code"), [(400, "SlowDown"), (503, "ServiceUnavailable")])
def test_retry_after(provider, status, code):
    """The delay of the retry is at least the Retry-After of the response."""
    provider.behave = aws_error(status, code, Retry_After="9")
    assert botocore_errors()(raised(send, provider.url)) == Verdict(RETRYABLE, retry_after=9)


def test_no_credentials(provider, monkeypatch):
    """A call without credentials gives NOT_PROCESSED."""
    session = botocore.session.Session()
    monkeypatch.setattr(session, "get_credentials", lambda *args, **kwargs: None)
    client = session.create_client("sqs", region_name="us-east-1", endpoint_url=provider.url)
    with pytest.raises(exceptions.NoCredentialsError) as caught:
        client.send_message(QueueUrl=f"{provider.url}/1/mail", MessageBody="hello")
    assert outcomes(caught.value) == (NOT_PROCESSED, NOT_PROCESSED)
    assert provider.seen == 0


def test_illegal_parameter(provider):
    """An illegal parameter gives NOT_PROCESSED."""
    client = SESSION.client("sqs", endpoint_url=provider.url)
    with pytest.raises(exceptions.ParamValidationError) as caught:
        client.send_message(QueueUrl=7)
    assert outcomes(caught.value) == (NOT_PROCESSED, NOT_PROCESSED)
    assert provider.seen == 0


def test_throttling_codes():
    """The classifier knows all of botocore's throttling codes."""
    known = THROTTLING_CODES | IN_PROGRESS_CODES
    assert known.issuperset(ThrottledRetryableChecker._THROTTLED_ERROR_CODES)
    assert THROTTLING_CODES.issuperset(TransientRetryableChecker._TRANSIENT_ERROR_CODES)
