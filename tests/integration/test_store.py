"""The promises of every store, on real servers, alone and with many processes at a time."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from celery_sqs_backoff.safe import StoreInTransaction, StoreUnavailable
from celery_sqs_backoff.safe.document import Document
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.settings import open_store
from tests.support.processes import eventually, free_port

from .django_app import project
from .store_peer import Peer, forked_peers
from .stores import NAMES, SHARED, served

PEERS = 16
RACES = 6


@pytest.fixture(scope="module", params=NAMES)
def any_store(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with served(request.param, directory) as there:
        yield there


@pytest.fixture
def store(any_store):
    return any_store.store


@pytest.fixture
def key(request):
    return f"test:{request.node.name}"


def test_first_add_wins(store, key):
    """The first caller adds a record. Later callers of ``add`` get its value."""
    assert store.add(key, "mine", 60) is None
    assert store.add(key, "theirs", 60) == "mine"
    assert store.get(key) == "mine"


def test_missing_record(store, key):
    """A record that was never added cannot be read, replaced or deleted."""
    assert store.get(key) is None
    assert not store.replace(key, "", "new", 60)
    assert not store.delete(key, "")
    assert store.get(key) is None


def test_compare_and_replace(store, key):
    """The store replaces a record only if the caller passes its current value."""
    store.add(key, "a", 60)
    assert not store.replace(key, "b", "c", 60)
    assert store.get(key) == "a"
    assert store.replace(key, "a", "c", 60)
    assert store.get(key) == "c"


def test_compare_and_delete(store, key):
    """The store deletes a record only if the caller passes its current value."""
    store.add(key, "a", 60)
    assert not store.delete(key, "b")
    assert store.get(key) == "a"
    assert store.delete(key, "a")
    assert store.get(key) is None
    assert store.add(key, "again", 60) is None


def test_ended_record(store, key):
    """For all four operations of the store, a record that has ended does not exist."""
    store.add(key, "old", 0.2)
    eventually(lambda: store.get(key) is None, timeout=5)
    assert not store.replace(key, "old", "new", 60)
    assert not store.delete(key, "old")
    assert store.add(key, "new", 60) is None
    assert store.get(key) == "new"


def test_replace_sets_end(store, key):
    """``replace`` with a lifetime gives a record a new end."""
    store.add(key, "a", 60)
    assert store.replace(key, "a", "b", 0.2)
    eventually(lambda: store.get(key) is None, timeout=5)


def test_short_lifetime(store, key):
    """A record with a lifetime of less than a second lives that long.

    Rounding or a time zone must not end it early.
    """
    started = time.monotonic()
    store.add(key, "a", 0.8)
    while time.monotonic() - started < 0.6:
        assert store.get(key) == "a" or time.monotonic() - started > 0.7


def test_replace_keeps_end(store, key):
    """``replace`` without a lifetime keeps a record's end."""
    store.add(key, "a", 1.5)
    assert store.replace(key, "a", "b", None)
    assert store.get(key) == "b"
    eventually(lambda: store.get(key) is None, timeout=5)
    assert not store.replace(key, "b", "c", None)


def test_replace_by_same_value(store, key):
    """``replace`` with the same value succeeds.

    This is how a lock is renewed. MySQL reports how many rows it has changed, which is 0 then.
    """
    store.add(key, "a", 60)
    assert store.replace(key, "a", "a", None)
    assert not store.replace(key, "b", "b", None)


@pytest.mark.parametrize(
    ("one", "other"), [("cus_Nffr", "cus_nffr"), ("cafe", "café"), ("a", "a "), ("1", "01")]
)
def test_similar_keys_differ(store, key, one, other):
    """The store keeps records apart whose keys or values are nearly the same.

    MySQL's default collations would take them for equal. Then a guard would refuse another
    customer's mail.
    """
    assert store.add(f"{key}{one}", one, 60) is None
    assert store.add(f"{key}{other}", other, 60) is None
    assert store.get(f"{key}{one}") == one
    assert not store.replace(f"{key}{one}", other, "stolen", 60)
    assert not store.delete(f"{key}{one}", other)
    assert store.get(f"{key}{one}") == one


@pytest.mark.parametrize("text", ["", "é\n\0"[:2], '{"a": "ü"}', "x" * 50_000])
def test_values_unchanged(store, key, text):
    """The store returns the same text that was stored."""
    store.add(key, text, 60)
    assert store.get(key) == text
    assert store.replace(key, text, text + "!", 60)
    assert store.delete(key, text + "!")


# Several processes


@pytest.fixture(scope="module")
def peers(any_store):
    if any_store.name not in SHARED:
        pytest.skip("not shared between processes")
    with any_store.peers(PEERS) as peers:
        yield peers


def _all(peers: list[Peer], function: str, *arguments: list[Any]) -> list[Any]:
    """Call a function in all peers at the same time, each with its own value per argument."""
    for peer, own in zip(peers, zip(*arguments, strict=True), strict=True):
        peer.ask(function, *own)
    return [peer.answer() for peer in peers]


def test_race_to_add(peers, key):
    """Of many processes that add a record, exactly one succeeds."""
    for race in range(RACES):
        names = [f"peer {n}" for n in range(PEERS)]
        answers = _all(peers, "add", [f"{key}{race}"] * PEERS, names, [60] * PEERS)
        assert answers.count(None) == 1, answers
        assert set(answers) - {None} == {names[answers.index(None)]}


def test_race_for_ended_record(any_store, peers, key):
    """Of many processes that add a record after its end, exactly one succeeds."""
    for race in range(3):
        any_store.store.add(f"{key}{race}", "old", 0.05)
    eventually(lambda: any_store.store.get(f"{key}2") is None)
    for race in range(3):
        names = [f"peer {n}" for n in range(PEERS)]
        answers = _all(peers, "add", [f"{key}{race}"] * PEERS, names, [60] * PEERS)
        assert answers.count(None) == 1, answers


def test_race_to_replace(any_store, peers, key):
    """Of many processes that replace a record, exactly one succeeds."""
    for race in range(RACES):
        any_store.store.add(f"{key}{race}", "old", 60)
        names = [f"peer {n}" for n in range(PEERS)]
        answers = _all(
            peers, "replace", [f"{key}{race}"] * PEERS, ["old"] * PEERS, names, [60] * PEERS
        )
        assert answers.count(True) == 1, answers
        assert any_store.store.get(f"{key}{race}") == names[answers.index(True)]


def test_race_of_steps(any_store, peers, key):
    """If many processes begin steps at the same time, the record lists all of the steps.

    A step that is not in the list would never be undone.
    """
    names = [f"step {n}" for n in range(PEERS)]
    assert _all(peers, "step", [key] * PEERS, names) == names
    records = Records(any_store.store, namespace="race", secrets=["secret"])
    assert sorted(Document(records, "steps", key).fields["steps"]) == sorted(names)


@pytest.mark.parametrize("any_store", ["redis"], indirect=True)
def test_race_for_exclusive(peers, key, tmp_path):
    """Of many processes, only one at a time is inside ``exclusive``."""
    some = peers[:4]
    turns = _all(some, "take_turns", [key] * 4, [str(tmp_path / "inside")] * 4, [10] * 4)
    assert sum(turns) == 40, "two processes were inside at the same time"


@pytest.mark.parametrize("shift", [-3600, 3600])
@pytest.mark.parametrize("any_store", ["postgresql", "redis"], indirect=True)
def test_wrong_clock(store, key, shift):
    """A record does not end early for a process with a wrong clock.

    The clock of the server decides. DynamoDB has none: see ``test_dynamodb_clock_skew``.
    """
    store.add(key, "held", 60)
    right = time.time
    with patch("time.time", lambda: right() + shift):
        assert store.add(key, "stolen", 60) == "held"
        assert store.add(f"{key}2", "theirs", 60) is None
        store.add(f"{key}3", "short", 0.2)
    assert store.get(f"{key}2") == "theirs"
    eventually(lambda: store.get(f"{key}3") is None, timeout=3)


# Promises of a single store


def test_dynamodb_clock_skew(tmp_path):
    """On DynamoDB, records are safe if clocks differ by at most ``clock_skew_seconds``.

    A worker whose clock is 4 s ahead does not take over a lock that has 3 s left.
    """
    with served("dynamodb", tmp_path) as there:
        url = there.url.replace("clock_skew_seconds=0", "clock_skew_seconds=5")
        store, ahead = open_store(url), SimpleNamespace(time=lambda: time.time() + 4)
        assert store.add("lease", "held", 3) is None
        with patch("celery_sqs_backoff.store.dynamodb.time", ahead):
            assert store.add("lease", "stolen", 3) == "held"
            ahead.time = lambda: time.time() + 10
            assert store.add("lease", "taken over", 3) is None


def test_mariadb_time_zones(tmp_path):
    """Two MariaDB sessions with different time zones agree on when a record ends.

    Otherwise a lock of one session would end an hour early or late for the other.
    """
    with served("mariadb", tmp_path) as there:
        database = there.database or {}
        project.add_database(
            "elsewhere",
            project.mariadb(database["NAME"], database["OPTIONS"]["unix_socket"], hours_ahead=1),
        )
        elsewhere = open_store("django://elsewhere")
        for mine, theirs in ((there.store, elsewhere), (elsewhere, there.store)):
            held, ended = f"lock:{id(mine)}", f"ended:{id(mine)}"
            assert mine.add(held, "held", 60) is None
            assert theirs.add(held, "stolen", 60) == "held"
            assert mine.add(ended, "held", 0.2) is None
            eventually(lambda theirs=theirs, key=ended: theirs.get(key) is None, timeout=5)
        project.close("elsewhere")


@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
def test_write_in_transaction(name, tmp_path):
    """The Django store raises an error if it should write inside a transaction.

    A rollback would remove the record. If the store has a database alias of its own, it can write.
    """
    from django.db import transaction

    with served(name, tmp_path) as there:
        alias = there.url.removeprefix("django://")
        with pytest.raises(StoreInTransaction, match="own"), transaction.atomic(using=alias):
            there.store.add("key", "value", 60)
        if name == "postgresql":
            project.add_database("records", there.database or {})
            with transaction.atomic(using=alias):
                open_store("django://records").add("key", "value", 60)
                transaction.set_rollback(True, using=alias)
            project.close("records")
            assert there.store.get("key") == "value"


def test_migrations(tmp_path):
    """The package has all migrations that its models need."""
    from django.core.management import call_command

    with served("sqlite", tmp_path):
        call_command("makemigrations", "celery_sqs_backoff", check=True, dry_run=True, verbosity=0)


def _away() -> dict[str, str]:
    port = free_port()
    project.add_database("away", project.postgresql("none") | {"PORT": str(port)})
    return {
        "redis": f"redis://127.0.0.1:{port}/0",
        "django": "django://away",
        "dynamodb": f"dynamodb://t?region=us-east-1&endpoint_url=http://127.0.0.1:{port}",
    }


@pytest.mark.parametrize("name", ["redis", "django", "dynamodb"])
def test_store_away(name, monkeypatch):
    """A store that cannot be reached raises StoreUnavailable."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    store = open_store(_away()[name])
    with pytest.raises(StoreUnavailable):
        store.get("key")
    with pytest.raises(StoreUnavailable):
        store.add("key", "value", 60)


@pytest.mark.parametrize("name", ["postgresql", "mariadb"])
def test_lost_connection(name, tmp_path):
    """The store records a step even if its connection is lost while the step's function runs.

    For example, a proxy closes idle connections, or the database restarts.
    """
    from django.db import connections

    with served(name, tmp_path) as there:
        connection = connections[there.url.removeprefix("django://")]
        steps = Document(Records(there.store), "steps", "order:7")

        def charge():
            _end_session(connection)
            return "charged"

        assert steps.step("charge", charge, (), {}) == "charged"
        again = Document(Records(there.store), "steps", "order:7")
        assert again.step("charge", lambda: "again", (), {}) == "charged"


def test_lost_pool(tmp_path):
    """The store can write after all connections of its pool were lost.

    With ``OPTIONS["pool"]``, the next connection that Django gives out may also be lost.
    """
    from django.db import connections

    with served("postgresql", tmp_path) as there:
        pooled = (there.database or {}) | {"OPTIONS": {"pool": {"min_size": 8, "max_size": 8}}}
        project.add_database("pooled", pooled)
        connection = connections["pooled"]
        try:
            with closing(connection):
                store = open_store("django://pooled")
                store.add("key", "begun", 60)
                eventually(lambda: connection.pool.get_stats()["pool_available"] == 7)
                with connections[there.url.removeprefix("django://")].cursor() as cursor:
                    cursor.execute(
                        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                assert store.replace("key", "begun", "done", 60)
        finally:
            connection.close_pool()


def _end_session(connection: Any) -> None:
    """Let the server close a connection. The client does not notice."""
    other = connection.copy()
    with other.cursor() as cursor:
        if connection.vendor == "postgresql":
            pid = connection.connection.info.backend_pid
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        else:
            cursor.execute("KILL %s", [connection.connection.thread_id()])
    other.close()


def test_deadlock_repeated(tmp_path):
    """The store repeats a statement that the database has rolled back because of a deadlock.

    If it raised an error instead, a step that was just done would have no record.
    """
    from django.db import OperationalError, connections

    with served("sqlite", tmp_path) as there:
        refused = []

        def refuse_once(execute, sql, *arguments):
            if sql.startswith("UPDATE") and not refused:
                refused.append(sql)
                raise OperationalError(1213, "Deadlock found when trying to get lock")
            return execute(sql, *arguments)

        there.store.add("key", "begun", 60)
        with connections[there.url.removeprefix("django://")].execute_wrapper(refuse_once):
            assert there.store.replace("key", "begun", "done", 60)
        assert refused


@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
def test_failover(database, tmp_path):
    """After a failover, the store connects to the server that its address now leads to.

    The old server keeps its connections, but it is read-only. Many projects never close theirs.
    """
    with served(database, tmp_path) as there:
        from django.db import connections

        there.store.add("key", "begun", 60)
        connection = connections[there.url.removeprefix("django://")]
        with connection.cursor() as cursor:
            cursor.execute(
                "SET SESSION TRANSACTION READ ONLY"
                if database == "mariadb"
                else "SET default_transaction_read_only=on"
            )
        connection.close_at = None  # CONN_MAX_AGE
        assert there.store.replace("key", "begun", "done", 60)
        assert there.store.get("key") == "done"


def test_strict_isolation(tmp_path):
    """At PostgreSQL's strictest isolation level, the store loses no step of several processes.

    If statements of several processes change the same row, PostgreSQL accepts only one. The store
    repeats the others.
    """
    with served("postgresql", tmp_path) as there:
        strict = {"options": "-c default_transaction_isolation=serializable"}
        database = (there.database or {}) | {"OPTIONS": strict}
        with forked_peers(there.url, database, 4) as peers:
            for number in range(10):
                names = [f"step {number} {peer}" for peer in range(4)]
                assert _all(peers, "step", ["strict"] * 4, names) == names
        records = Records(there.store, namespace="race", secrets=["secret"])
        assert len(Document(records, "steps", "strict").fields["steps"]) == 40
