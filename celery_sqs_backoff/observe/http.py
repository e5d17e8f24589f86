"""Serve ``/metrics`` for Prometheus and ``/healthz`` for Kubernetes over HTTP in a worker."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..text import BUG_CALLS, error_site

logger = logging.getLogger(__name__)

#: Seconds that a client may take to send its request.
_CLIENT_SECONDS = 10.0

_TEXT = "text/plain; charset=utf-8"


def serve(
    host: str,
    port: int,
    *,
    metrics: Callable[[], tuple[bytes, str]] | None,
    faults: Callable[[], list[str]],
) -> ThreadingHTTPServer:
    """Start a server in a thread. To end it, call its ``shutdown()`` and ``server_close()``.

    Args:
        host: address to listen on.
        port: port to listen on. 0 = any free port. The result's ``server_port`` is its number.
        metrics: returns the page for ``/metrics`` and its content type; ``None`` = no such page.
        faults: returns the worker's faults. ``/healthz`` answers 200 if there are no faults, else
            503.

    Raises:
        OSError: the port is in use, or this machine does not have the address.
        OverflowError: the number is too large for a port.
    """

    class PageHandler(BaseHTTPRequestHandler):
        timeout = _CLIENT_SECONDS  # ends the thread for a client that sends no request

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, body, content_type = 404, b"expected /metrics or /healthz", _TEXT
            if path == "/metrics" and metrics is not None:
                status, (body, content_type) = 200, metrics()
            elif path == "/healthz":
                found = faults()
                status, body = ((503 if found else 200), ("; ".join(found) or "ok").encode())
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
            """Do not log requests. The base class would print each of them."""

    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    class Server(ThreadingHTTPServer):
        address_family = family
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log an error in one line, except for a client that disconnects.

            The base class would print a traceback.
            """
            exc = sys.exc_info()[1]
            if exc is not None and not isinstance(exc, OSError):
                logger.error("sqs_backoff.page_failed: %s", error_site(exc, calls=BUG_CALLS))

    server = Server((str(address[0]), port), PageHandler)
    threading.Thread(target=server.serve_forever, name="sqs-observe", daemon=True).start()
    return server
