"""The store on Redis servers that fail over, evict records, are full or lack rights."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, SO_LINGER, SOL_SOCKET, create_server, socket
from threading import Thread
from types import SimpleNamespace

import pytest
import redis
from celery import Celery
from celery.exceptions import ImproperlyConfigured, Retry

from celery_sqs_backoff import Guard, SQSBackoffTask
from celery_sqs_backoff.doctor import examine
from celery_sqs_backoff.doctor.look import look
from celery_sqs_backoff.provider.fleet import FleetSlots
from celery_sqs_backoff.safe import RecordRejected, StoreUnavailable
from celery_sqs_backoff.store.check import StoreStep, check_by_asking
from celery_sqs_backoff.store.settings import open_store, records_of
from tests.support.processes import free_port
from tests.support.redis_server import redis_server


def test_failover(tmp_path):
    """After a failover, the store connects to the server that its address now leads to.

    The old server has become a replica. It keeps its connections, but refuses all writes.
    """
    with redis_server(tmp_path / "old") as old, redis_server(tmp_path / "new") as new:
        address = tmp_path / "address"
        address.symlink_to(old)
        store = open_store(f"unix://{address}")
        assert store.add("key", "value", 60) is None
        redis.Redis(unix_socket_path=str(old)).replicaof("127.0.0.1", str(free_port()))
        address.unlink()
        address.symlink_to(new)
        assert store.add("another", "value", 60) is None
        assert redis.Redis(unix_socket_path=str(new)).dbsize() == 1


def test_lost_connection(tmp_path):
    """The store records a step even if its connection was lost during a long run.

    A NAT gateway or a load balancer may have forgotten the connection. It answers with a reset.
    """
    with redis_server(tmp_path / "redis") as socket, _forgetful_gateway(socket) as gateway:
        store = open_store(f"redis://127.0.0.1:{gateway.port}/0")
        assert store.add("step", "in progress", 60) is None
        gateway.forget()
        assert store.replace("step", "in progress", "done", 60)
        assert store.get("step") == "done"


@pytest.mark.parametrize(
    ("options", "is_named"),
    [
        (("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru"), True),
        # Managed servers have this policy by default. It evicts records, as each record has an end.
        (("--maxmemory", "5mb", "--maxmemory-policy", "volatile-lru"), True),
        (("--maxmemory", "5mb", "--maxmemory-policy", "noeviction"), False),
        (("--maxmemory", "0", "--maxmemory-policy", "allkeys-lru"), False),
    ],
    ids=lambda value: " ".join(value[1::2]) if isinstance(value, tuple) else "",
)
def test_evicting_server(tmp_path, caplog, options, is_named):
    """The worker and the doctor warn of a Redis server that evicts records."""
    app = Celery("evicts", broker="memory://", set_as_current=False)
    with redis_server(tmp_path / "redis", *options) as socket:
        app.conf.sqs_backoff = {"store": f"unix://{socket}", "secret": "secret"}
        with caplog.at_level(logging.WARNING):
            StoreStep(None).create(SimpleNamespace(app=app, pool_cls="solo"))
        found = [finding for finding in examine(look(app)) if finding.id == "W034"]
    said = [r.getMessage() for r in caplog.records if "store_evicts" in r.getMessage()]
    assert (len(said), len(found)) == (is_named, is_named)
    assert all(options[3] in text for text in (*said, *(finding.evidence for finding in found)))


def test_info_denied(tmp_path):
    """The doctor reports no finding if it is not allowed to read the server's settings."""
    app = Celery("unknown", broker="memory://", set_as_current=False)
    options = ("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path / "redis", *options) as socket:
        redis.Redis(unix_socket_path=str(socket)).execute_command("ACL SETUSER default -info")
        app.conf.sqs_backoff = {"store": f"unix://{socket}", "secret": "secret"}
        assert [finding.id for finding in examine(look(app)) if "store" in finding.subject] == []


#: The rights that docs/stores.md lists.
_RIGHTS = "~celery-sqs-backoff:* +select +evalsha +script|load +get +set +del"


@pytest.mark.parametrize("denied", ["", "-evalsha", "-@scripting", "-del", "-set", "resetkeys"])
def test_missing_right(tmp_path, denied):
    """The worker refuses to start if its Redis user lacks a right that runs need."""
    app = Celery("limited", broker="memory://", set_as_current=False)
    with redis_server(tmp_path / "redis") as socket:
        server = redis.Redis(unix_socket_path=str(socket))
        server.execute_command(*f"ACL SETUSER worker on >word {_RIGHTS} {denied}".split())
        app.conf.sqs_backoff = {"store": f"unix://worker:word@{socket}?db=1", "secret": "secret"}
        if denied:
            with pytest.raises(ImproperlyConfigured, match="rights of its user"):
                check_by_asking(app)
            return
        check_by_asking(app)
        assert server.info("keyspace") == {}, "the check has left a record"
        slots = FleetSlots(
            records_of(app), ("provider",), rate=1, worker="one", clock=time.monotonic
        )
        assert slots.take(1).workers == 1


def test_full_server(tmp_path):
    """On a full server, the store cannot add records, but it can read and delete old ones."""
    with redis_server(tmp_path / "redis", "--maxmemory", "3mb") as socket:
        store = open_store(f"unix://{socket}")
        assert store.add("old", "value", 60) is None
        with pytest.raises(StoreUnavailable, match="OutOfMemory"):  # noqa: PT012  # some time
            for number in range(1000):
                store.add(f"large:{number}", "x" * 10_000, 60)
        assert store.get("old") == "value"
        assert store.add("old", "another", 60) == "value"
        assert store.delete("old", "value")


@pytest.mark.parametrize("why", ["full", "replica"])
def test_read_only_server(tmp_path, why):
    """A server that refuses writes counts as away.

    A worker starts with it. A task with a guard is retried and does not run.
    """
    app = Celery("refuses", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.sqs_backoff = {"store": f"unix://{tmp_path}/redis/redis.sock", "secret": "secret"}

    @app.task(shared=False, base=SQSBackoffTask, name="pay", guard=Guard(key="all", window=60))
    def pay():
        pytest.fail("it has run")

    with redis_server(tmp_path / "redis") as socket:
        _refuse_writes(redis.Redis(unix_socket_path=str(socket)), why)
        with pytest.raises(StoreUnavailable):
            check_by_asking(app)
        pay.push_request(id="message", called_directly=False, retries=0, args=(), kwargs={})
        with pytest.raises(Retry):
            pay.run()
        pay.request_stack.pop()


class _Gateway:
    """Forwards connections to a Unix socket.

    After :meth:`forget`, it resets each older connection when a client uses it.
    """

    def __init__(self, address: Path) -> None:
        self._address = address
        self._times_forgotten = 0
        self._listener = create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def forget(self) -> None:
        self._times_forgotten += 1

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._forward, args=(client, self._times_forgotten), daemon=True).start()

    def _forward(self, client: socket, born: int) -> None:
        with socket(AF_UNIX) as server, client:
            server.connect(str(self._address))
            while request := client.recv(65536):
                if born != self._times_forgotten:
                    client.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    return
                server.sendall(request)
                client.sendall(server.recv(65536))  # each response is small enough for one packet

    def close(self) -> None:
        self._listener.shutdown(SHUT_RDWR)
        self._listener.close()


@contextmanager
def _forgetful_gateway(address: Path) -> Iterator[_Gateway]:
    gateway = _Gateway(address)
    thread = Thread(target=gateway.serve, daemon=True)
    thread.start()
    try:
        yield gateway
    finally:
        gateway.close()
        thread.join(10)


def _refuse_writes(server: redis.Redis, why: str) -> None:
    if why == "replica":
        server.replicaof("127.0.0.1", str(free_port()))
        return
    server.set("large", "x" * 2_000_000)
    server.config_set("maxmemory", "1mb")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        server.set("filler", "x")


def test_record_not_text(tmp_path):
    """The store rejects a record that is not text.

    Another client of the Redis server can write any bytes.
    """
    with redis_server(tmp_path / "redis") as socket:
        store = open_store(f"unix://{socket}")
        store.add("key", "ours", 60)
        server = redis.Redis(unix_socket_path=str(socket))
        [key] = server.keys()
        server.set(key, b"\xff\x00", keepttl=True)
        with pytest.raises(RecordRejected):
            store.get("key")
