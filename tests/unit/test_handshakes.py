"""A fork waits for TLS handshakes that other threads have begun, but not for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from celery_sqs_backoff.sqs import clients
from celery_sqs_backoff.sqs import handshakes as module
from celery_sqs_backoff.sqs.handshakes import Handshakes
from tests.support.servers import sqs_client

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_fork_waits():
    """A fork waits until a running handshake ends. Meanwhile no other handshake begins."""
    handshakes, order = Handshakes(), []
    first = handshakes.begin()

    def fork():
        handshakes.before_fork()
        order.append("fork")
        handshakes.after_fork()

    def second():
        with handshakes.one():
            order.append("second handshake")

    forking = in_thread(fork)
    while not handshakes._fork_waits:
        time.sleep(0.001)
    shaking = in_thread(second)
    time.sleep(0.05)
    assert order == []
    handshakes.end(first)
    forking.join(5)
    shaking.join(5)
    assert order == ["fork", "second handshake"]


def test_hanging_handshake(monkeypatch):
    """A handshake that hangs delays one fork only.

    STS may not answer for minutes. In this time a pool may fork many times to replace processes.
    """
    monkeypatch.setattr(module, "_LONGEST_WAIT_SECONDS", 0.2)
    handshakes = Handshakes()
    handshakes.begin()
    began = time.monotonic()
    for _ in range(20):
        handshakes.before_fork()
        handshakes.after_fork()
    assert 0.2 <= time.monotonic() - began < 2


def test_handshake_of_client(monkeypatch):
    """A client's connection counts as a handshake from TCP to the end of TLS.

    The handshake fails here, because the server does not speak TLS.
    """
    seen = []
    monkeypatch.setattr(module.handshakes, "begin", lambda: seen.append("begin"))
    monkeypatch.setattr(module.handshakes, "end", lambda _: seen.append("end"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        in_thread(lambda: server.accept()[0].close())
        endpoint = f"https://127.0.0.1:{server.getsockname()[1]}"
        client = clients._copy(sqs_client(endpoint), clients._SETTLING, 15)
        with pytest.raises(Exception, match=r"SSL|reset|closed|Could not connect"):
            client.receive_message(QueueUrl="https://127.0.0.1/1/q")
    assert seen == ["begin", "end"]


def test_guard_forks_twice():
    """A second call of ``guard_forks`` changes nothing: a fork still waits, and does not hang."""
    code = (
        "import os, time, threading\n"
        "from celery_sqs_backoff.sqs.handshakes import guard_forks, handshakes\n"
        "guard_forks(); guard_forks()\n"
        "first = handshakes.begin()\n"
        "began = time.monotonic()\n"
        "threading.Timer(0.2, handshakes.end, [first]).start()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    handshakes.begin()\n"
        "    os._exit(7)\n"
        "assert time.monotonic() - began >= 0.2\n"
        "handshakes.begin()\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
