"""How does my task behave when its provider fails? A small HTTP proxy that makes it fail.

It stands before the provider, or a fake of it, and harms only the requests that you choose::

    with running_provider_proxy("http://127.0.0.1:8000") as proxy:
        proxy.inject(
            drop_answer(
                when=lambda request: request.json()["amount"] == 666,
                times=2,
                per=lambda request: request.headers["Idempotency-Key"],
            )
        )
        pay(proxy.url, amount=666)   # charged, and the answer is lost; twice per key

In pytest, ``celery_sqs_backoff.testing`` has it as the fixture ``provider_proxy``. It needs only
the standard library. Use it only in tests, because it keeps every request in memory.
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

#: Seconds that the provider may take to answer the proxy.
_PROVIDER_TIMEOUT_SECONDS = 30

#: Headers for one of the proxy's two connections (RFC 9110, 7.6.1). It sets its own ``Host``.
_NOT_PASSED_ON = {
    *("connection", "content-length", "host", "keep-alive", "proxy-authenticate"),
    *("proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
}


@dataclass(frozen=True)
class ProviderRequest:
    """A request to the provider. ``path`` has the query; ``headers`` ignore case."""

    method: str
    path: str
    headers: Message = field(repr=False)
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """Read the body as JSON. Raises ``ValueError`` if it is not JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault for chosen requests, made by ``fail`` or ``drop_answer``.

    Arguments:
        when: ``(request) -> bool``: chooses the requests. ``None`` (default) = all. If it raises,
            the connection is closed, and the traceback is on stderr.
        times: how many requests it harms, from 1 up; later ones pass. ``None`` (default) = all.
        per: ``(request) -> id``: ``times`` is counted for each id separately. ``None`` (default) =
            one count for all.

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
            raise ValueError("invalid per: expected times= too, which says how many per id")


def fail(
    status: int = 503, *, headers: Mapping[str, str] | None = None, body: bytes = b"", **which: Any
) -> Fault:
    """Answer with a status, 200 to 599, default 503. The provider never sees the request.

    ``headers`` and ``body`` are the answer's. ``which`` takes ``when``, ``times`` and ``per`` of
    ``Fault``.
    """
    return Fault(kind="fail", status=status, headers=dict(headers or {}), body=body, **which)


def drop_answer(**which: Any) -> Fault:
    """Close the connection after the provider has acted, so that its answer is lost.

    ``which`` takes ``when``, ``times`` and ``per`` of ``Fault``.
    """
    return Fault(kind="drop-answer", **which)


@dataclass(frozen=True)
class Exchange:
    """The end of a request, with the status that the caller got.

    ``forwarded`` is true if the provider may have acted on the request, even without an answer.
    ``status`` is ``None`` if the caller got no answer. ``fault`` is ``None`` if no fault chose it.
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
        self._lock = threading.RLock()  # a predicate may look at the exchanges

    @property
    def exchanges(self) -> list[Exchange]:
        """A copy of all ended exchanges, oldest first."""
        with self._lock:
            return list(self._exchanges)

    def inject(self, *faults: Fault) -> None:
        """Add faults behind the existing ones. The first fault that fits a request is applied."""
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
        """Return the caller's answer, or ``None`` to close the connection."""
        fault = self._fault_for(request)
        answer: _Answer | None
        if fault is not None and fault.kind == "fail":
            forwarded, answer = False, (fault.status, fault.headers.items(), fault.body)
        else:
            forwarded, answer = _forward(self._upstream, request)
            if fault is not None and fault.kind == "drop-answer":
                answer = None
        # Record the exchange before the answer leaves, so that the caller finds it there.
        with self._lock:
            status = None if answer is None else answer[0]
            self._exchanges.append(Exchange(request, forwarded, status, fault))
        return answer


#: Status, headers and body.
_Answer = tuple[int, Iterable[tuple[str, str]], bytes]


def _forward(upstream: SplitResult, request: ProviderRequest) -> tuple[bool, _Answer]:
    """Pass a request on. Returns whether the provider may have acted, and its answer."""
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
        upstream: ``http://`` or ``https://`` URL of the provider. Its path is put before the paths
            of the requests.

    Raises:
        ValueError: ``upstream`` is no such URL.
    """
    split = urlsplit(upstream)
    if split.scheme not in ("http", "https") or not split.netloc:
        raise ValueError(f"invalid upstream {upstream!r}: expected an http or https URL")

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
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

        # http.server calls these names.
        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = handle_any  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Drop the log line, because requests are the user's data."""

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
