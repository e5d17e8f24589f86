"""The proxy with which users test a task against a provider that fails."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import trustme

from celery_sqs_backoff.provider_proxy import (
    ProviderProxy,
    ProviderRequest,
    drop_answer,
    fail,
    running_provider_proxy,
)
from tests.support.cases import cases
from tests.support.http_faults import close, http_faults, nobody


class Payments:
    """A payment provider that charges each idempotency key once, as real providers do."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: Counter[str] = Counter()
        self.charged: dict[str, int] = {}


@pytest.fixture
def payments():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = self.headers["Idempotency-Key"]
            provider.calls[key] += 1
            provider.charged.setdefault(key, body["amount"])
            self.answer(201, json.dumps({"charged": key, "path": self.path}).encode())

        def do_HEAD(self):
            self.answer(200, b"")

        def do_DELETE(self):
            self.answer(204, b"")

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("X-Provider", "payments")
            self.send_header("Set-Cookie", "a=1")
            self.send_header("Set-Cookie", "b=2")
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = Payments(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield provider
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(provider_proxy, payments):
    return provider_proxy(payments.url)


def pay(proxy: ProviderProxy, key: str, amount: int = 10, **options: Any) -> requests.Response:
    return requests.post(
        f"{proxy.url}/charges?currency=eur",
        json={"amount": amount},
        headers={"Idempotency-Key": key},
        **{"timeout": 5, **options},
    )


def key(request: ProviderRequest) -> str:
    return str(request.headers["idempotency-key"])


def test_no_fault(proxy, payments):
    """Without a fault, the proxy passes request and response on, and records both."""
    answer = pay(proxy, "a")

    assert answer.status_code == 201
    assert answer.headers["X-Provider"] == "payments"
    assert answer.cookies == {"a": "1", "b": "2"}
    assert answer.json() == {"charged": "a", "path": "/charges?currency=eur"}
    assert payments.charged == {"a": 10}
    [exchange] = proxy.exchanges
    assert (exchange.forwarded, exchange.status, exchange.fault) == (True, 201, None)
    assert (exchange.request.method, exchange.request.path) == ("POST", "/charges?currency=eur")
    assert exchange.request.json() == {"amount": 10}


def test_no_body(proxy):
    """The proxy passes on responses without a body."""
    assert requests.head(proxy.url, timeout=5).headers["X-Provider"] == "payments"
    assert requests.delete(f"{proxy.url}/charges/a", timeout=5).status_code == 204


def test_body_of_unknown_length(proxy, payments):
    """The proxy refuses a request that does not give the length of its body (status 411)."""
    chunks = iter([b'{"amount":', b" 10}"])
    assert requests.post(f"{proxy.url}/charges", data=chunks, timeout=5).status_code == 411
    assert (payments.charged, proxy.exchanges) == ({}, [])


def test_path_of_provider(payments):
    """If the provider's URL has a path, the proxy puts it before the path of the request."""
    with running_provider_proxy(f"{payments.url}/v1/") as proxy:
        assert pay(proxy, "a").json()["path"] == "/v1/charges?currency=eur"


def test_fail(proxy, payments):
    """With the fault ``fail``, the proxy answers itself, and the provider gets no request."""
    fault = fail(429, headers={"Retry-After": "7"}, body=b"slow down")
    proxy.inject(fault)
    answer = pay(proxy, "a")

    assert (answer.status_code, answer.headers["Retry-After"], answer.content) == (
        429,
        "7",
        b"slow down",
    )
    assert payments.calls == {}
    [exchange] = proxy.exchanges
    assert (exchange.forwarded, exchange.status, exchange.fault) == (False, 429, fault)


def test_drop_answer(proxy, payments):
    """With the fault ``drop_answer``, the provider does the work, but its response is lost."""
    proxy.inject(drop_answer())
    with pytest.raises(requests.ConnectionError):
        pay(proxy, "a")

    assert payments.charged == {"a": 10}
    [exchange] = proxy.exchanges
    assert (exchange.forwarded, exchange.status) == (True, None)


def test_times_per_id(proxy, payments):
    """A fault hits only requests that ``when`` selects, and each key at most ``times`` times."""
    proxy.inject(fail(503, when=lambda request: request.json()["amount"] == 666, times=2, per=key))

    statuses = [
        [pay(proxy, name, amount).status_code for _ in range(4)]
        for name, amount in (("a", 666), ("b", 666), ("c", 10))
    ]

    assert statuses == [[503, 503, 201, 201], [503, 503, 201, 201], [201] * 4]


def test_two_faults(proxy):
    """If there are two faults, the second applies when the first is used up."""
    proxy.inject(fail(500, times=1), fail(429, times=1))
    assert [pay(proxy, "a").status_code for _ in range(3)] == [500, 429, 201]


def test_tls(provider_proxy, tmp_path, monkeypatch):
    """The proxy calls a provider over TLS only if it trusts the provider's certificate."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with http_faults(context) as provider:
        proxy = provider_proxy(provider.url)
        assert pay(proxy, "a").status_code == 502
        assert provider.seen == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert pay(proxy, "a").status_code == 200
        assert provider.seen == 1


def test_when(proxy):
    """The function ``when`` can use the proxy's earlier exchanges."""
    proxy.inject(fail(when=lambda request: len(proxy.exchanges) == 1))
    assert [pay(proxy, "a").status_code for _ in range(3)] == [201, 503, 201]


def test_repr(proxy):
    """The repr of an exchange does not show its body and headers, which may have secrets."""
    pay(proxy, "secret-key", 4711)
    assert "secret-key" not in repr(proxy.exchanges)
    assert "4711" not in repr(proxy.exchanges)


@cases(
    "make message",
    {
        "per without times": (lambda: fail(per=key), "per"),
        "upstream": (
            lambda: running_provider_proxy("localhost:80").__enter__(),
            "invalid upstream",
        ),
    },
)
def test_invalid_argument(make, message):
    """The proxy refuses an invalid argument, and names it."""
    with pytest.raises(ValueError, match=message):
        make()


def test_example(provider_proxy, sqs_celery_app, sqs_worker):
    """The example in docs/testing.md works.

    ``tests/unit/test_docs.py`` runs the blocks of other pages. The test in this example needs
    fixtures, so it runs here.
    """
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    *blocks, last = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    test = names["test_a_payment_whose_answer_is_lost_is_charged_once"]
    test(provider_proxy, sqs_celery_app, sqs_worker)
    exec(last, names)


def test_provider_without_answer(provider_proxy):
    """An exchange counts as forwarded if the provider got the request but did not respond."""
    with http_faults() as provider:
        provider.behave = close
        proxy = provider_proxy(provider.url)
        assert (
            requests.post(f"{proxy.url}/charges", json={"amount": 1}, timeout=5).status_code == 502
        )
        assert provider.seen == 1
        unreachable = provider_proxy(f"http://{nobody()}")
        requests.post(f"{unreachable.url}/charges", json={"amount": 1}, timeout=5)
    assert [exchange.forwarded for exchange in (*proxy.exchanges, *unreachable.exchanges)] == [
        True,
        False,
    ]
