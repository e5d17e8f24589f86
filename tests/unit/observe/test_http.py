"""What becomes of requests that end badly: nothing that fills the worker's log."""

import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import ThreadingHTTPServer

import pytest

from celery_sqs_backoff.observe.http import serve
from tests.support.processes import eventually

Start = Callable[[Callable[[], tuple[bytes, str]]], ThreadingHTTPServer]


@pytest.fixture
def start():
    made = []

    def start(metrics):
        made.append(serve("127.0.0.1", 0, metrics=metrics, faults=list))
        return made[-1]

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


def test_client_leaves(start, capfd, caplog):
    """A client that leaves writes nothing to the log.

    It may be a probe or a scrape that times out, again and again.
    """
    handled = []

    def page():
        client.close()  # with a reset
        return b"x" * 50_000_000, "text/plain"

    server = start(page)
    close = server.shutdown_request

    def note(request):
        close(request)
        handled.append(request)

    server.shutdown_request = note
    client = socket.create_connection(("127.0.0.1", server.server_port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    eventually(lambda: handled)
    assert capfd.readouterr().err == ""
    assert caplog.text == ""


def test_page_fails(start, capfd, caplog):
    """A page that fails is logged without the text of its error."""

    def page():
        raise LookupError("SECRET")

    server = start(page)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=5)
    eventually(lambda: "sqs_backoff.page_failed: builtins.LookupError" in caplog.text)
    assert "SECRET" not in caplog.text + capfd.readouterr().err
