"""Test how a task behaves when its provider fails, with a small HTTP proxy that injects faults.

The proxy forwards requests to the provider, or to a fake of it, and injects a fault only into the
requests that you choose::

    with running_provider_proxy("http://127.0.0.1:8000") as proxy:
        proxy.inject(
            drop_answer(
                when=lambda request: request.json()["amount"] == 666,
                times=2,
                per=lambda request: request.headers["Idempotency-Key"],
            )
        )
        pay(proxy.url, amount=666)   # charged, but the answer is lost; twice per key

In pytest, use the fixture ``provider_proxy`` of ``celery_sqs_backoff.testing``. The proxy needs
only the standard library. Use it only in tests, because it keeps every request in memory.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

__all__ = [
    "Exchange",
    "Fault",
    "ProviderProxy",
    "ProviderRequest",
    "drop_answer",
    "fail",
    "running_provider_proxy",
]

#: Seconds that the proxy waits for the provider's answer.
_PROVIDER_TIMEOUT_SECONDS = 30

#: Headers that the proxy does not forward: they are about one connection (RFC 9110, 7.6.1), or the
#: proxy sets its own (``Host``).
_NOT_PASSED_ON = {
    *("connection", "content-length", "host", "keep-alive", "proxy-authenticate"),
    *("proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
}


@dataclass(frozen=True)
class ProviderRequest:
    """A request that the proxy has received for the provider.

    ``path`` includes the query. The case of names in ``headers`` does not matter.
    """

    method: str
    path: str
    headers: Message = field(repr=False)
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """Return the body as JSON. Raises ``ValueError`` if it is not JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that the proxy injects into chosen requests. Make it by ``fail`` or ``drop_answer``.

    Arguments:
        when: ``(request) -> bool`` chooses the requests. ``None`` (default) = all requests. If the
            callable raises, the proxy closes the connection and prints the traceback on stderr.
        times: number of requests that get the fault, from 1 up. Later requests do not get it.
            ``None`` (default) = no limit.
        per: ``(request) -> id``. With it, ``times`` is counted separately for each ID. ``None``
            (default) = one count for all requests.

    Raises:
        ValueError: ``per`` is given without ``times``.
    """

    kind: Literal["fail", "drop-answer"]
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    when: Callable[[ProviderRequest], object] | None = None
    times: int | None = None
    per: Callable[[ProviderRequest], Hashable] | None = None

    def __post_init__(self) -> None:
        if self.per is not None and self.times is None:
            raise ValueError("invalid per: expected times= too, the number of faults per id")


def fail(
    status: int = 503, *, headers: Mapping[str, str] | None = None, body: bytes = b"", **which: Any
) -> Fault:
    """Return a fault for which the proxy itself answers. The provider does not get the request.

    Arguments:
        status: status of the answer, 200 to 599. Default 503.
        headers: headers of the answer. Default: no headers.
        body: body of the answer. Default: empty.
        which: ``when``, ``times`` and ``per`` of ``Fault``.
    """
    return Fault(kind="fail", status=status, headers=dict(headers or {}), body=body, **which)


def drop_answer(**which: Any) -> Fault:
    """Return a fault for which the provider gets the request, but its answer is lost.

    The proxy closes the connection to the caller instead of forwarding the answer.

    Arguments:
        which: ``when``, ``times`` and ``per`` of ``Fault``.
    """
    return Fault(kind="drop-answer", **which)


@dataclass(frozen=True)
class Exchange:
    """A request that has ended, with the status that the caller got.

    ``forwarded``: whether the provider may have acted on the request, even if it sent no answer.
    ``status``: ``None`` if the caller got no answer. ``fault``: ``None`` if the request got no
    fault.
    """

    request: ProviderRequest
    forwarded: bool
    status: int | None
    fault: Fault | None = None


class ProviderProxy:
    """A running proxy. Give ``url`` to your code in place of the provider's address."""

    def __init__(self, url: str, upstream: SplitResult) -> None:
        self.url = url
        self._upstream = upstream
        self._faults: list[Fault] = []
        self._harmed: Counter[tuple[int, Hashable]] = Counter()
        self._exchanges: list[Exchange] = []
        self._lock = threading.RLock()  # reentrant, because ``when`` may read ``exchanges``

    @property
    def exchanges(self) -> list[Exchange]:
        """A list of all exchanges that have ended, oldest first."""
        with self._lock:
            return list(self._exchanges)

    def inject(self, *faults: Fault) -> None:
        """Add faults after the existing ones.

        A request gets the first fault that chooses it and whose ``times`` are not used up.
        """
        with self._lock:
            self._faults += faults

    def _fault_for(self, request: ProviderRequest) -> Fault | None:
        with self._lock:
            for position, fault in enumerate(self._faults):
                if fault.when is not None and not fault.when(request):
                    continue
                counted = position, None if fault.per is None else fault.per(request)
                if fault.times is None or self._harmed[counted] < fault.times:
                    self._harmed[counted] += 1
                    return fault
        return None

    def _answer_to(self, request: ProviderRequest) -> _Answer | None:
        """Return the answer for the caller, or ``None`` to close the connection."""
        fault = self._fault_for(request)
        answer: _Answer | None
        if fault is not None and fault.kind == "fail":
            forwarded, answer = False, (fault.status, fault.headers.items(), fault.body)
        else:
            forwarded, answer = _forward(self._upstream, request)
            if fault is not None and fault.kind == "drop-answer":
                answer = None
        # Record the exchange before the answer is sent, so that the caller finds it afterwards.
        with self._lock:
            status = None if answer is None else answer[0]
            self._exchanges.append(Exchange(request, forwarded, status, fault))
        return answer


#: An answer: status, headers and body.
_Answer = tuple[int, Iterable[tuple[str, str]], bytes]


def _forward(upstream: SplitResult, request: ProviderRequest) -> tuple[bool, _Answer]:
    """Forward a request. Return whether the provider may have acted, and the provider's answer."""
    connect = (
        http.client.HTTPSConnection if upstream.scheme == "https" else http.client.HTTPConnection
    )
    connection = connect(upstream.netloc, timeout=_PROVIDER_TIMEOUT_SECONDS)
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        path = upstream.path.rstrip("/") + request.path
        connection.request(request.method, path, body=request.body or None, headers=headers)
        response = connection.getresponse()
        passed = [(k, v) for k, v in response.getheaders() if k.lower() not in _NOT_PASSED_ON]
        return True, (response.status, passed, response.read())
    except (OSError, http.client.HTTPException) as exc:
        return is_connected, (502, (), f"no answer: {type(exc).__name__}".encode())
    finally:
        connection.close()


@contextmanager
def running_provider_proxy(upstream: str) -> Iterator[ProviderProxy]:
    """Run a proxy on a free port of 127.0.0.1, in threads of this process, until the block ends.

    Arguments:
        upstream: ``http://`` or ``https://`` URL of the provider. Its path becomes the prefix of
            the requests' paths.

    Raises:
        ValueError: ``upstream`` is not an HTTP URL.
    """
    split = urlsplit(upstream)
    if split.scheme not in ("http", "https") or not split.netloc:
        raise ValueError(f"invalid upstream {upstream!r}: expected an http or https URL")

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if "Transfer-Encoding" in self.headers:  # the proxy does not read chunks
                return self.send_error(HTTPStatus.LENGTH_REQUIRED)
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = ProviderRequest(self.command, self.path, self.headers, sent)
            if (answer := proxy._answer_to(request)) is None:
                return
            status, headers, body = answer
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        # http.server calls the methods with these names.
        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = handle_any  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Write no log line, because requests are user data."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = ProviderProxy(f"http://127.0.0.1:{server.server_port}", split)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
