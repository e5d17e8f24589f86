"""The classifiers know for real errors of HTTP libraries whether the server may have acted.

A failed call is *in doubt* if the server may have acted. Its outcome is UNKNOWN. A task that is
idempotent repeats it.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import trustme
import urllib3

from celery_sqs_backoff import classifiers
from celery_sqs_backoff.retry.outcomes import Outcome, Verdict
from tests.support.http_faults import (
    Behaviour,
    answer,
    close,
    garbage,
    half,
    hang,
    http_faults,
    nobody,
    overflowing,
    reset,
    silent,
    wanting_credentials,
)
from tests.support.verdicts import REPEATED, raised, shown

RETRYABLE, NOT_PROCESSED, UNKNOWN = Outcome.RETRYABLE, Outcome.NOT_PROCESSED, Outcome.UNKNOWN

TIMEOUT_SECONDS = 0.25


def by_requests(url: str, ca: Path | None = None) -> None:
    response = requests.post(
        url,
        data=b"{}",
        timeout=TIMEOUT_SECONDS,
        verify=True if ca is None else str(ca),
    )
    response.raise_for_status()


def by_httpx(url: str, ca: Path | None = None) -> None:
    response = httpx.post(
        url,
        content=b"{}",
        timeout=TIMEOUT_SECONDS,
        verify=_context(ca),
        trust_env=False,
        follow_redirects=True,
    )
    response.raise_for_status()


def by_urllib(url: str, ca: Path | None = None) -> None:
    with urllib.request.urlopen(
        url, data=b"{}", timeout=TIMEOUT_SECONDS, context=_context(ca)
    ) as response:
        response.read()


def by_urllib3(url: str, ca: Path | None = None, **options: Any) -> None:
    with urllib3.PoolManager(ssl_context=_context(ca), timeout=TIMEOUT_SECONDS) as pool:
        pool.request("POST", url, body=b"{}", **options)


def by_urllib3_without_its_retries(url: str, ca: Path | None = None) -> None:
    by_urllib3(url, ca, retries=False)


def _context(ca: Path | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca)


Call = Callable[..., None]

#: The libraries that raise an error for a status, with their classifiers. urllib3 raises none.
WITH_STATUS = {
    by_requests: classifiers.requests_errors,
    by_httpx: classifiers.httpx_errors,
    by_urllib: classifiers.urllib_errors,
}
ALL = {
    **WITH_STATUS,
    by_urllib3: classifiers.urllib_errors,
    by_urllib3_without_its_retries: classifiers.urllib_errors,
}


def name(call: object) -> str:
    return getattr(call, "__name__", "")[3:]


every_library = pytest.mark.parametrize("call", ALL, ids=name)
every_library_with_status = pytest.mark.parametrize("call", WITH_STATUS, ids=name)


def verdicts(call: Call, exc: Exception) -> tuple[Verdict | Outcome | None, ...]:
    """Return the verdict by default, and the verdict if the task is idempotent."""
    found = tuple(ALL[call](idempotent=idempotent)(exc) for idempotent in (False, True))
    # ``known_errors``, which names no library, must give the same verdict.
    for idempotent in (False, True):
        assert classifiers.known_errors(idempotent=idempotent)(exc) == found[idempotent]
    return found


def outcomes(call: Call, exc: Exception) -> tuple[Outcome | str | None, ...]:
    return tuple(map(shown, verdicts(call, exc)))


@pytest.fixture(scope="module")
def provider():
    with http_faults() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_seen(provider, monkeypatch):
    provider.seen = 0
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(scope="module")
def secure(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with http_faults(context) as running:
        yield running


# Nothing was sent


def at(url: str) -> AbstractContextManager[str]:
    """Return a context manager that yields an address without a server."""
    return nullcontext(url)


#: Places where a call ends before its request leaves.
NOT_SENT: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "refused connection": (lambda: at(nobody()), "http://{}/"),
    "no such name": (lambda: at("provider.invalid"), "http://{}/"),  # RFC 6761, 6.4
    "no connection in time": (overflowing, "http://{}/"),
    "silence in the handshake": (silent, "https://{}/"),
}


@every_library
@pytest.mark.parametrize(("place", "url"), NOT_SENT.values(), ids=NOT_SENT.keys())
def test_nothing_was_sent(call, place, url):
    """A failure before the request leaves is retryable."""
    with place() as address:
        exc = raised(call, url.format(address))
    assert outcomes(call, exc) == (RETRYABLE, RETRYABLE)


@every_library
def test_untrusted_certificate(call, secure):
    """A certificate that the client does not trust gives NOT_PROCESSED."""
    secure.seen = 0
    exc = raised(call, secure.url)
    assert outcomes(call, exc) == (NOT_PROCESSED, NOT_PROCESSED)
    assert secure.seen == 0


@every_library
def test_expired_certificate(call, authority, ca):
    """An expired certificate gives RETRYABLE, because the provider will renew it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ended = datetime.now(timezone.utc) - timedelta(days=1)
    authority.issue_cert("127.0.0.1", not_after=ended).configure_cert(context)
    with http_faults(context) as expired:
        exc = raised(call, expired.url, ca)
    assert outcomes(call, exc) == (RETRYABLE, RETRYABLE)


@every_library
def test_server_without_tls(call, provider):
    """A server that does not speak TLS gives RETRYABLE."""
    exc = raised(call, provider.url.replace("http:", "https:"))
    assert outcomes(call, exc) == (RETRYABLE, RETRYABLE)
    assert provider.seen == 0


@every_library
def test_invalid_url(call):
    """An invalid URL gives NOT_PROCESSED."""
    exc = raised(call, "http://127.0.0.1:80 80/")
    assert outcomes(call, exc) == (NOT_PROCESSED, NOT_PROCESSED)


# The request left


def two_lengths(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 7\r\n\r\nhello")


def to_nobody(handler: Any) -> None:
    """Redirect the client to an address where no server listens."""
    answer(303, Location=f"http://{nobody()}/")(handler)


#: What the server does with a request, and the libraries that then raise an error.
IN_DOUBT: dict[str, tuple[Behaviour, Iterable[Call]]] = {
    **{behave.__name__: (behave, ALL) for behave in (reset, close, hang, garbage, half)},
    "unreadable header": (two_lengths, (by_requests, by_urllib3)),
    "redirect to nobody": (to_nobody, (*WITH_STATUS, by_urllib3)),
    # The invalid URL is in the server's response, so the server has acted.
    "redirect to no port": (
        answer(303, Location="http://127.0.0.1:99999999/"),
        (by_requests, by_httpx, by_urllib3),
    ),
    "redirect to FTP": (answer(303, Location="ftp://x/"), (by_requests, by_httpx, by_urllib3)),
}


@pytest.mark.parametrize(
    ("call", "behaviour"),
    [
        pytest.param(call, behaviour, id=f"{name(call)}-{what}")
        for what, (behaviour, calls) in IN_DOUBT.items()
        for call in calls
    ],
)
def test_no_proper_answer(call, provider, behaviour):
    """A call is in doubt if the server has got the request and sent no proper response."""
    provider.behave = behaviour
    exc = raised(call, provider.url)
    assert provider.seen == 1
    assert outcomes(call, exc) == (UNKNOWN, REPEATED)


@every_library
@pytest.mark.parametrize("behaviour", [reset, close, hang], ids=lambda b: b.__name__)
def test_no_answer_over_tls(call, secure, ca, behaviour):
    """A call over TLS is in doubt if the server has got the request and not answered it."""
    secure.seen = 0
    secure.behave = behaviour
    exc = raised(call, secure.url, ca)
    assert secure.seen == 1
    assert outcomes(call, exc) == (UNKNOWN, REPEATED)


# The status of the response decides


@every_library_with_status
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (403, (NOT_PROCESSED, NOT_PROCESSED)),
        (408, (RETRYABLE, RETRYABLE)),
        (409, (UNKNOWN, REPEATED)),
        (429, (RETRYABLE, RETRYABLE)),
        (500, (UNKNOWN, REPEATED)),
        (502, (UNKNOWN, REPEATED)),
        (503, (UNKNOWN, REPEATED)),
    ],
)
def test_status(call, provider, status, expected):
    """The status of the response decides the outcome."""
    provider.behave = answer(status)
    assert outcomes(call, raised(call, provider.url)) == expected
    assert provider.seen == 1


@every_library_with_status
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after(call, provider, status):
    """The delay of the retry is at least the Retry-After of the response."""
    provider.behave = answer(status, Retry_After="17")
    verdict = Verdict(RETRYABLE, retry_after=17)
    assert verdicts(call, raised(call, provider.url)) == (verdict, verdict)


# Redirects: the first server may have done the work already


def by_urllib3s_pool(url: str) -> None:
    with urllib3.connection_from_url(url) as pool:
        pool.request("POST", url, body=b"{}", timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("call", "location"),
    [(by_requests, f"http://{'a' * 80}.example/"), (by_urllib3s_pool, "http://127.0.0.1:99999/")],
    ids=["a label of a host is too long", "no such port"],
)
def test_redirect_error(call, provider, location):
    """A call is in doubt after a redirect to an invalid location.

    urllib3 raises this error, and requests passes it on unchanged.
    """
    provider.behave = answer(303, Location=location)
    exc = raised(call, provider.url)
    assert provider.seen == 1
    assert isinstance(exc, urllib3.exceptions.LocationParseError)
    assert shown(classifiers.known_errors()(exc)) is UNKNOWN


@every_library_with_status
@pytest.mark.parametrize("status", [404, 503])
def test_status_after_redirect(call, provider, status):
    """A call is in doubt if an error status comes after a redirect with 303.

    The first server has acted, and has redirected the client to a page with the result.
    """
    with http_faults() as second:
        second.behave = answer(status)
        provider.behave = answer(303, Location=second.url)
        exc = raised(call, provider.url)
    assert outcomes(call, exc) == (UNKNOWN, REPEATED)


@pytest.mark.parametrize("call", [by_requests, by_httpx], ids=name)
@pytest.mark.parametrize("status", [307, 308])
def test_redirect_of_request(call, provider, status):
    """If a redirect sends the request to another server, that server's status decides."""
    with http_faults() as second:
        second.behave = answer(429)
        provider.behave = answer(status, Location=second.url)
        exc = raised(call, provider.url)
        assert second.seen == 1
    assert outcomes(call, exc) == (RETRYABLE, RETRYABLE)


@pytest.mark.parametrize(
    ("post", "errors", "digest"),
    [
        (requests.post, classifiers.requests_errors, requests.auth.HTTPDigestAuth("us", "secret")),
        (httpx.post, classifiers.httpx_errors, httpx.DigestAuth("us", "secret")),
    ],
    ids=["requests", "httpx"],
)
@pytest.mark.parametrize(("status", "means"), [(429, RETRYABLE), (422, NOT_PROCESSED)])
def test_digest_challenge(provider, post, errors, digest, status, means):
    """A 401 that asks for a digest does not count as a redirect.

    The client keeps it in the response's ``history``, as it does with redirects, but the server has
    done nothing.
    """
    asked = iter([answer(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')])

    provider.behave = lambda handler: next(asked, answer(status))(handler)
    response = post(provider.url, data={"order": "7"}, auth=digest, timeout=TIMEOUT_SECONDS)
    with pytest.raises((requests.HTTPError, httpx.HTTPStatusError)) as raised_by_it:
        response.raise_for_status()
    assert provider.seen == 2
    assert shown(errors()(raised_by_it.value)) is means


# Errors of a single library


def test_invalid_header(provider):
    """An invalid header that requests refuses gives NOT_PROCESSED."""
    exc = raised(lambda: requests.post(provider.url, headers={"X-Id": "a\nb"}, timeout=5))
    assert isinstance(exc, requests.exceptions.InvalidHeader)
    assert outcomes(by_requests, exc) == (NOT_PROCESSED, NOT_PROCESSED)


@pytest.mark.parametrize("library", ["requests", "urllib3"])
def test_refused_after_retry(library):
    """A call is in doubt if urllib3's second attempt finds no connection.

    The first attempt has reached the server, which then stopped.
    """
    retry = urllib3.Retry(2, backoff_factor=0, allowed_methods=None)
    with http_faults() as dying:
        dying.behave = lambda handler: dying.stop_listening()
        exc = raised(lambda: by_retrying(library, dying.url, retry))
        assert dying.seen == 1
    call = by_requests if library == "requests" else by_urllib3
    assert outcomes(call, exc) == (UNKNOWN, REPEATED)


def by_retrying(library: str, url: str, retry: urllib3.Retry) -> requests.Response | None:
    """Call with urllib3's own retries."""
    if library == "urllib3":
        urllib3.PoolManager().request("POST", url, retries=retry, timeout=5)
        return None
    with requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter(max_retries=retry))
        return session.post(url, timeout=5)


@pytest.mark.parametrize("connect", [None, False])
@pytest.mark.parametrize("library", ["requests", "urllib3"])
def test_timeout_after_retry(library, connect, monkeypatch):
    """A call is in doubt if urllib3's second attempt gets no connection in time.

    The first attempt has reached the server.
    """
    retry = urllib3.Retry(2, connect=connect, backoff_factor=0, allowed_methods=None)

    def too_late(*_, **__):
        raise TimeoutError

    with http_faults() as dying:

        def behave(handler):
            monkeypatch.setattr("urllib3.util.connection.create_connection", too_late)

        dying.behave = behave
        exc = raised(lambda: by_retrying(library, dying.url, retry))
        assert dying.seen == 1
    known = classifiers.known_errors()(exc)
    assert known is not None
    assert getattr(known, "outcome", known) is Outcome.UNKNOWN


def through(proxy: str, url: str) -> dict[Call, Callable[[], object]]:
    """Return a call of each library through a proxy."""
    scheme = url.partition(":")[0]
    return {
        by_requests: lambda: requests.post(url, proxies={scheme: proxy}, timeout=5),
        by_urllib3: lambda: urllib3.ProxyManager(proxy).request("POST", url),
        by_httpx: lambda: httpx.Client(proxy=proxy).post(url),
    }


@pytest.mark.parametrize("call", [by_requests, by_urllib3, by_httpx], ids=name)
def test_proxy_wants_credentials(call):
    """A proxy that asks for credentials gives NOT_PROCESSED."""
    with wanting_credentials() as proxy:
        exc = raised(through(proxy, "https://provider.invalid/")[call])
    assert outcomes(call, exc) == (NOT_PROCESSED, NOT_PROCESSED)


def test_retries_end_with_status(provider):
    """A call is in doubt if the retries of requests end with an error status."""
    provider.behave = answer(503)
    retry = urllib3.Retry(1, status_forcelist=[503], allowed_methods=None)
    exc = raised(lambda: by_retrying("requests", provider.url, retry))
    assert isinstance(exc, requests.exceptions.RetryError)
    assert provider.seen == 2
    assert outcomes(by_requests, exc) == (UNKNOWN, REPEATED)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (502, 429, (UNKNOWN, REPEATED)),
        (502, 402, (UNKNOWN, REPEATED)),
        (429, 429, (RETRYABLE, RETRYABLE)),
        (429, 402, (NOT_PROCESSED, NOT_PROCESSED)),
    ],
)
def test_refusal_after_retry(provider, first, second, expected):
    """If urllib3 has retried, the status of the first response also counts.

    The server may have done the work at the first attempt.
    """
    provider.behave = lambda handler: answer(first if provider.seen == 1 else second)(handler)
    retry = urllib3.Retry(1, status_forcelist=[first], allowed_methods=None, raise_on_status=False)
    response = by_retrying("requests", provider.url, retry)
    assert response is not None
    exc = raised(response.raise_for_status)
    assert provider.seen == 2
    assert outcomes(by_requests, exc) == expected


def test_answer_not_json(provider):
    """The classifier does not classify the error of a response that is not JSON."""
    provider.behave = answer(200, b"<h1>welcome</h1>")
    exc = raised(lambda: requests.post(provider.url, timeout=5).json())
    assert isinstance(exc, requests.JSONDecodeError)
    assert verdicts(by_requests, exc) == (None, None)


@pytest.mark.parametrize("call", [by_requests, by_urllib3, by_httpx], ids=name)
def test_proxy_refuses_tunnel(call, provider):
    """A proxy that refuses the tunnel gives RETRYABLE.

    Here the proxy is a server that does not know ``CONNECT`` and answers 501.
    """
    exc = raised(through(provider.url, "https://provider.invalid/")[call])
    assert provider.seen == 0
    assert outcomes(call, exc) == (RETRYABLE, RETRYABLE)


@pytest.mark.parametrize("call", [by_requests, by_urllib3], ids=name)
def test_proxy_goes_silent(call, provider):
    """A call is in doubt if a proxy closes the connection after the request."""
    provider.behave = close
    exc = raised(through(provider.url, "http://provider.invalid/")[call])
    assert provider.seen  # more than once, as urllib3 repeats the request after such an error
    assert outcomes(call, exc) == (UNKNOWN, REPEATED)


def test_invalid_body(provider):
    """A request body that cannot be encoded gives NOT_PROCESSED."""
    exc = raised(lambda: requests.post(provider.url, json=float("nan"), timeout=5))
    assert isinstance(exc, requests.exceptions.InvalidJSONError)
    assert provider.seen == 0
    assert outcomes(by_requests, exc) == (NOT_PROCESSED, NOT_PROCESSED)
