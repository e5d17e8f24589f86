"""Make an empty store of each kind, on a real server, for the tests of stores."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
import redis
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from celery_sqs_backoff.store.protocol import Store
from celery_sqs_backoff.store.settings import open_store
from tests.support.redis_database import redis_url

from .django_app import project
from .store_peer import Peer, forked_peers

REDIS_URL = redis_url()

NAMES = ("memory", "sqlite", "postgresql", "mariadb", "redis", "dynamodb")
SHARED = NAMES[1:]

_PORTS = {"redis": 6379, "postgresql": 5432}
_MARIADB_SOCKET = "/run/mysqld/mysqld.sock"


@dataclass
class Served:
    """A store, and what another process needs to reach it."""

    name: str
    store: Store
    url: str
    database: dict[str, Any] | None = None

    def peers(self, count: int) -> AbstractContextManager[list[Peer]]:
        return forked_peers(self.url, self.database, count)


@contextmanager
def served(name: str, directory: Path) -> Iterator[Served]:
    require(name)
    makers = {
        "sqlite": _sqlite,
        "postgresql": _postgresql,
        "mariadb": _mariadb,
        "redis": _redis,
        "memory": _memory,
        "dynamodb": _dynamodb,
    }
    yield from makers[name](directory)


def require(name: str) -> None:
    """If a server is missing, skip the test on a laptop, and fail it in CI."""
    give_up = pytest.fail if os.environ.get("CI") else pytest.skip
    if name in _PORTS and not _listens(_PORTS[name]):
        give_up(f"needs {name} on 127.0.0.1:{_PORTS[name]}")
    if name == "mariadb" and not Path(_MARIADB_SOCKET).exists():
        give_up(f"needs mariadb on {_MARIADB_SOCKET}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _memory(_: Path) -> Iterator[Served]:
    url = f"memory://{uuid4().hex}"
    yield Served("memory", open_store(url), url)


def _redis(_: Path) -> Iterator[Served]:
    database = redis.Redis.from_url(REDIS_URL)
    database.flushdb()
    yield Served("redis", open_store(REDIS_URL), REDIS_URL)
    database.flushdb()


def _sqlite(directory: Path) -> Iterator[Served]:
    yield from _django("sqlite", project.sqlite(directory / "records.sqlite3"))


def _postgresql(_: Path) -> Iterator[Served]:
    with postgresql_database() as name:
        yield from _django("postgresql", project.postgresql(name))


@contextmanager
def postgresql_database() -> Iterator[str]:
    """Create an empty database, yield its name, and drop it afterwards."""
    import psycopg

    name = f"safe_{uuid4().hex[:12]}"
    with psycopg.connect(
        "host=127.0.0.1 user=postgres dbname=postgres", autocommit=True
    ) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield name
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def _mariadb(_: Path) -> Iterator[Served]:
    """Make a store on MariaDB whose sessions are two hours ahead of UTC.

    A store that used Django's ``Now()`` would get local time there.
    """
    import pymysql

    name = f"safe_{uuid4().hex[:12]}"
    with pymysql.connect(unix_socket=_MARIADB_SOCKET, user="root") as connection:
        connection.cursor().execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        try:
            yield from _django("mariadb", project.mariadb(name, _MARIADB_SOCKET))
        finally:
            connection.cursor().execute(f"DROP DATABASE {name}")


def _django(name: str, database: dict[str, Any]) -> Iterator[Served]:
    alias = f"{name}_{uuid4().hex[:8]}"
    project.add_database(alias, database)
    project.migrate(alias)
    yield Served(name, open_store(f"django://{alias}"), f"django://{alias}", database)
    project.close(alias)


def _dynamodb(_: Path) -> Iterator[Served]:
    table = f"records-{uuid4().hex[:8]}"
    with pytest.MonkeyPatch.context() as patch, _moto() as endpoint:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        client = boto3.client("dynamodb", endpoint_url=endpoint, region_name="us-east-1")
        client.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        url = f"dynamodb://{table}?region=us-east-1&endpoint_url={endpoint}&clock_skew_seconds=0"
        yield Served("dynamodb", open_store(url), url)
        client.delete_table(TableName=table)


@contextmanager
def _moto() -> Iterator[str]:
    """Run a moto server that answers one call at a time.

    With several calls at a time, two conditional writes of the same item may both succeed on moto.
    On DynamoDB they never do.
    """
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
