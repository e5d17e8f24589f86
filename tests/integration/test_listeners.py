"""Other machines cannot reach the servers that tests, benchmarks and the demo start."""

import os
import socket

import pytest

from celery_sqs_backoff.provider_proxy import running_provider_proxy
from example_project.processes import Programs
from example_project.services import SQS
from tests.support.fault_proxy import fault_proxy
from tests.support.listeners import beyond_loopback, listening_on
from tests.support.processes import children
from tests.support.servers import ministack, moto

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_beyond_loopback(address):
    """``beyond_loopback`` finds a listener on an address that other machines can reach."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = address in ("0.0.0.0", "::")
    with socket.create_server((address, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert (f"{address}:{port}" in beyond_loopback(os.getpid())) is found
        assert port in [port for _, port in listening_on(os.getpid())]


def test_servers_on_loopback(tmp_path):
    """The servers of tests, benchmarks and the demo listen on loopback only.

    By default, ministack opens a port for MQTT on all addresses.
    """
    with ministack() as endpoint, moto(), fault_proxy(endpoint), Programs(tmp_path) as programs:
        SQS(programs, tmp_path)
        started = [*children()]
        assert len(started) >= 4
        assert all(listening_on(pid) for pid in started[-4:])
        assert [address for pid in started for address in beyond_loopback(pid)] == []


def test_fixtures_on_loopback(sqs_server):
    """The fixtures of ``celery_sqs_backoff.testing`` listen on loopback only."""
    before = set(beyond_loopback(os.getpid()))
    with running_provider_proxy("http://127.0.0.1:9") as proxy:
        port = int(proxy.url.rsplit(":", 1)[1].strip("/"))
        assert {port, int(sqs_server.rsplit(":", 1)[1])} <= {
            port for _, port in listening_on(os.getpid())
        }
        assert before == set(beyond_loopback(os.getpid())) == set()
