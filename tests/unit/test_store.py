"""The setting ``store``, and how the store in memory keeps records."""

import re
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.store.connections import close
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.settings import has_store, open_store, store_of


def test_no_store():
    """If an app has no store, the error names the setting."""
    app = Celery(set_as_current=False)
    assert not has_store(app)
    with pytest.raises(ImproperlyConfigured, match=r"sqs_backoff\['store'\]"):
        store_of(app)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("postgres://h/d", "memory://"),
        (7, "memory://"),
        (["redis://"], "memory://"),
        ("mysql://root:hunter2@host/", "unknown kind"),
        ("redis:/127.0.0.1", "redis URL"),
        ("redis://127.0.0.1:notaport/0", "port"),
        ("redis://127.0.0.1/zero", "number"),
        ("redis://:hunter2@127.0.0.1/0?colour=red", "redis URL"),
        ("redis://:hunter2@127.0.0.1:1/0?protocol=9", "redis URL"),
        ("rediss://:hunter2@127.0.0.1:1/0?ssl_cert_reqs=bogus", "rediss URL"),
        ("redis://:hunter2/ss@host:6379/0", "percent-encoded"),
        ("unix://x", "socket"),
        ("dynamodb://", "dynamodb URL"),
        ("dynamodb://t?regoin=x", "dynamodb URL"),
        ("dynamodb://t?clock_skew_seconds=soon", "dynamodb URL"),
        ("dynamodb://t?region=eu-central-1&clock_skew_seconds=inf", "dynamodb URL"),
        ("dynamodb://t?region=eu-central-1&clock_skew_seconds=-1", "dynamodb URL"),
    ],
    ids=str,
)
def test_wrong_store(named, why):
    """An invalid store is refused. The error does not show the URL, which may have a password."""
    with pytest.raises(ImproperlyConfigured, match=why) as refused:
        open_store(named)
    assert "hunter2" not in str(refused.value) + repr(refused.value.__cause__)
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_stores_in_memory():
    """Stores in memory with the same URL are the same store."""
    assert open_store("memory://a") is open_store("memory://a")
    assert open_store("memory://a") is not open_store("memory://b")


def test_hashed_keys():
    """The key of a record is a hash, and records with different names have different keys."""
    records = Records(MemoryStore(), namespace="a:b")
    names = ["x" * 300, "x" * 301, "cus_A", "cus_a", "b:c", "é", "\ud800"]
    keys = {records.key("step", name) for name in names} | {
        Records(MemoryStore(), namespace="a").key("step", "b:b:c")
    }
    assert len(keys) == len(names) + 1
    assert all(re.fullmatch("step:[0-9a-f]{64}", key) for key in keys)


def test_memory_is_freed():
    """The store in memory deletes records whose time is over."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    for n in range(1500):
        store.add(str(n), "value", 1)
        now[0] += 1
    assert len(store._records) < 1000


def test_pool_closed_twice():
    """Two threads can close the pool of their process at a time.

    Django then raises a ``KeyError`` in one of them, because the other has removed the pool.
    """

    def close_pool():
        raise KeyError("default")

    close(SimpleNamespace(close=list, close_pool=close_pool))
