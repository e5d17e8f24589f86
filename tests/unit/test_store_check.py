"""A worker checks its store when it starts, before the first message needs the store.

A shared store is one that several processes use, such as Redis.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.concurrency.prefork import TaskPool as Prefork
from celery.concurrency.solo import TaskPool as Solo
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff import SQSBackoffTask, WorkflowTask
from celery_sqs_backoff.store.check import StoreStep, check_by_asking, check_offline, forgery_of
from celery_sqs_backoff.store.errors import StoreRefused
from celery_sqs_backoff.store.memory import MemoryStore
from tests.support.processes import free_port


@pytest.fixture(autouse=True)
def no_django(monkeypatch):
    """Hide the settings of Django, because its SECRET_KEY would be used to sign records."""
    monkeypatch.setattr("celery_sqs_backoff.store.settings._django_secrets", lambda: ())


@pytest.fixture
def app(monkeypatch):
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    app = Celery("checked", broker="memory://", set_as_current=False)
    yield app
    app.close()


def test_store_away(app, monkeypatch, caplog):
    """If the store does not answer, the worker starts, and tries again until the store answers."""

    @app.task(shared=False, base=SQSBackoffTask, name="mail", lazy=False)
    def mail(): ...

    assert "celery_sqs_backoff.store.check:StoreStep" in app.steps["worker"]
    app.conf.sqs_backoff = {"store": f"redis://:secret@127.0.0.1:{free_port()}/0"}
    pauses = []

    def answer_the_third_time(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            app.conf.sqs_backoff = {"store": "memory://"}

    monkeypatch.setattr("celery_sqs_backoff.store.check.time.sleep", answer_the_third_time)
    monkeypatch.setattr("celery_sqs_backoff.store.check.start_daemon", lambda name, run: run())
    StoreStep.create(None, SimpleNamespace(app=app, pool_cls=Solo))
    assert pauses == [5, 10, 20]
    assert caplog.text.count("sqs_backoff.store_away: Redis: ConnectionError") == 3
    assert "sqs_backoff.store_answers" in caplog.text
    assert "secret" not in caplog.text


def test_memory_store_in_prefork(app):
    """A prefork worker refuses a store in memory, because its processes share no memory."""
    for store in ("memory://", MemoryStore()):
        app.conf.sqs_backoff = {"store": store}
        with pytest.raises(ImproperlyConfigured, match="prefork"):
            StoreStep.create(None, SimpleNamespace(app=app, pool_cls=Prefork))
        StoreStep.create(None, SimpleNamespace(app=app, pool_cls=Solo))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": 7}, "namespace"),
        ({"secret": ""}, "secret"),
        ({"secret": [1]}, "secret"),
        ({"encrypt": "fernet"}, "encrypt"),
    ],
)
def test_invalid_setting(app, settings, why):
    """The worker refuses an invalid ``namespace``, ``secret`` or ``encrypt``."""
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0", **settings}
    with pytest.raises(ImproperlyConfigured, match=why):
        check_offline(app)


def test_namespace_needed():
    """On a shared store, an app without a name must set ``namespace``.

    Otherwise staging and production could share records without notice.
    """
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0"}
    with pytest.raises(ImproperlyConfigured, match="namespace"):
        check_offline(app)
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0", "namespace": "shop-staging"}
    check_offline(app)
    app.conf.sqs_backoff = {"store": "memory://"}
    check_offline(app)


def test_workflow_needs_secret(app):
    """On a shared store, an app with a workflow must set ``secret``.

    Otherwise each message of the workflow would become a dead letter.
    """
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0"}
    check_offline(app)

    @app.task(base=WorkflowTask, shared=False, lazy=False)
    def fund(): ...

    with pytest.raises(ImproperlyConfigured, match="secret"):
        check_offline(app)
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0", "secret": "s"}
    check_offline(app)


def test_unsigned_records(app):
    """``forgery_of`` warns if records on a shared store are not signed."""
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0"}
    assert "secret" in str(forgery_of(app))
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:6379/0", "secret": "s"}
    assert forgery_of(app) is None
    app.conf.sqs_backoff = {"store": "memory://"}
    assert forgery_of(app) is None


def test_no_store(app):
    """If the app has no store, the check passes."""
    check_by_asking(app)


@pytest.mark.parametrize("denied", ["add", "get", "replace", "delete"])
def test_missing_right(app, denied):
    """The worker does not start if it lacks a right that runs need in the store.

    Without UPDATE on the table, or without dynamodb:GetItem, each run would fail.
    """

    class Limited(MemoryStore):
        def __getattribute__(self, name):
            if name == denied:
                raise StoreRefused("AccessDenied")
            return super().__getattribute__(name)

    app.conf.sqs_backoff = {"store": (store := MemoryStore())}
    check_by_asking(app)
    assert store._records == {}, "the check leaves no record"
    app.conf.sqs_backoff = {"store": Limited()}
    with pytest.raises(ImproperlyConfigured, match="AccessDenied"):
        check_by_asking(app)


class Cipher:
    def encrypt(self, data: bytes) -> bytes:
        return data[::-1]

    def decrypt(self, token: bytes) -> bytes:
        return token[::-1]


class OneWay(Cipher):
    def decrypt(self, token: bytes) -> bytes:
        raise PermissionError("hunter2")


@pytest.mark.parametrize("cipher", [Cipher, OneWay()], ids=["a class", "one way"])
def test_broken_cipher(app, cipher):
    """The worker does not start with a cipher that cannot decrypt what it has encrypted.

    Otherwise each step would be done but could not be recorded.
    """
    app.conf.sqs_backoff = {"store": MemoryStore(), "encrypt": Cipher()}
    check_by_asking(app)
    app.conf.sqs_backoff = {"store": MemoryStore(), "encrypt": cipher}
    with pytest.raises(ImproperlyConfigured, match="encrypt") as refused:
        check_by_asking(app)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "option", ["socket_timeout=-1", "socket_keepalive=1&socket_keepalive_options=x"]
)
def test_invalid_redis_option(app, option):
    """The worker does not start if an option of the Redis URL is invalid.

    redis-py finds these options invalid only when it connects.
    """
    app.conf.sqs_backoff = {
        "store": f"redis://127.0.0.1:6379?{option}",
        "namespace": "shop",
        "secret": "a",
    }
    with pytest.raises(ImproperlyConfigured, match="store"):
        check_by_asking(app)


def test_fork_keeps_database_pools(app, monkeypatch):
    """A forked process has none of Django's database connection pools of the main process.

    Celery closes the pools that a process has inherited. This would end the connections of the
    main process, so we remove the pools right after the fork, before Celery's code runs.
    """
    from django.db.backends.postgresql.base import DatabaseWrapper

    pools = {"default": object()}
    monkeypatch.setattr(DatabaseWrapper, "_connection_pools", pools, raising=False)
    StoreStep.create(None, SimpleNamespace(app=app, pool_cls=Solo))
    child = os.fork()
    if not child:
        os._exit(len(pools))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pools


def test_django_without_settings(monkeypatch):
    """A store in Django is refused if ``DJANGO_SETTINGS_MODULE`` is not set."""
    from django.conf import LazySettings

    monkeypatch.setattr(LazySettings, "configured", property(lambda self: False))
    app = Celery("unset", broker="memory://", set_as_current=False)
    app.conf.sqs_backoff = {"store": "django", "secret": "s" * 32}
    with pytest.raises(ImproperlyConfigured, match="set DJANGO_SETTINGS_MODULE"):
        check_offline(app)
