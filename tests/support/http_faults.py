"""An HTTP server that fails in a chosen way, so that HTTP clients raise their real errors.

::

    with http_faults() as provider:
        provider.behave = reset
        requests.post(provider.url)      # requests.exceptions.ConnectionError
        assert provider.seen == 1        # the request had arrived
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .processes import free_port


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    body = b""

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        provider = self.server.provider
        provider.seen += 1
        self.close_connection = True
        provider.behave(self)

    do_GET = do_PUT = do_POST  # noqa: N815  # http.server calls these names

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    provider: HttpFaults

    def handle_error(self, *args: object) -> None:
        pass  # Tests let clients give up and handshakes fail on purpose, so print no traceback.


Behaviour = Callable[[BaseHTTPRequestHandler], None]


class HttpFaults:
    """A running server. A test sets ``behave``. ``seen`` counts the requests that arrived whole."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen = 0
        self.behave: Behaviour = answer(200)
        self.over = threading.Event()
        self.listener: socket.socket | None = None

    def stop_listening(self) -> None:
        """Close the listening socket, so that new connections are refused."""
        assert self.listener is not None
        self.listener.close()


def answer(status: int, body: bytes = b"{}", **headers: str) -> Behaviour:
    """Answer with a status, and with headers such as ``Retry_After="7"``."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response_only(status)
        for name, value in {"Content_Type": "application/json", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        # Otherwise the client would use the closed connection for its next call.
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Send a TCP RST instead of an answer."""
    linger_for_no_time = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_no_time)
    handler.rfile.close()
    handler.connection.close()


def close(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Never answer."""
    server = handler.server
    assert isinstance(server, _Server)
    server.provider.over.wait()


def half(handler: BaseHTTPRequestHandler) -> None:
    """Answer 200 and announce 100 bytes, but send 10 and close the connection."""
    handler.wfile.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        b'{"id": "a1'
    )


def garbage(handler: BaseHTTPRequestHandler) -> None:
    """Answer with bytes that are not HTTP."""
    handler.wfile.write(b"\x00\x01 nonsense\r\n\r\n")


@contextmanager
def http_faults(tls: ssl.SSLContext | None = None) -> Iterator[HttpFaults]:
    """Run the server on a free port of 127.0.0.1. With ``tls`` it uses HTTPS."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if tls is not None:
        # The thread of the connection does the handshake. So a silent client does not block other
        # clients.
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    scheme = "http" if tls is None else "https"
    provider = HttpFaults(f"{scheme}://127.0.0.1:{server.server_address[1]}")
    server.provider = provider
    provider.listener = server.socket
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        provider.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def nobody() -> str:
    """Return a ``host:port`` that refuses connections."""
    return f"127.0.0.1:{free_port()}"


@contextmanager
def silent() -> Iterator[str]:
    """Yield a ``host:port`` that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def overflowing() -> Iterator[str]:
    """Yield a ``host:port`` where a connection waits, because the listener's backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"


class _Proxy(BaseHTTPRequestHandler):
    def do_CONNECT(self) -> None:
        self.send_error(407, "Proxy Authentication Required")

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def wanting_credentials() -> Iterator[str]:
    """Yield the URL of a proxy that wants credentials. It answers each CONNECT with 407."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
