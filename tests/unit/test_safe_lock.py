"""A lock lets only one run at a time work on an object, such as an account.

The lock is held for a time, its lease. W3 is a row of tests/field-stories.md.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_sqs_backoff import WorkflowTask
from celery_sqs_backoff.safe import Busy, HeldByItself, LockLost
from celery_sqs_backoff.safe.lock import Lock
from celery_sqs_backoff.store.records import Records
from tests.support.fake_sqs import Clock

from .safe_app import CountedStore, make_app


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("celery_sqs_backoff.safe.lock.time", clock)
    return clock


@pytest.fixture
def store(clock):
    return CountedStore(clock=clock.time)


@pytest.fixture
def records(store):
    return Records(store, secrets=["secret"])


def lock(records: Records, **options: Any) -> Lock:
    return Lock(records, "account:7", **options)


def test_one_holder(records, clock):
    """A lock has one holder at a time. Another run gets an error with the longest time to wait."""
    with lock(records, lease=60):
        clock.now += 20
        with pytest.raises(Busy) as busy:
            lock(records).acquire()
        assert busy.value.retry_before == 40
    with pytest.raises(KeyError), lock(records):
        raise KeyError
    lock(records).acquire()


def test_killed_holder(records, clock):
    """If a holder is killed, its lock stays held until the lease ends."""
    lock(records, lease=timedelta(minutes=1)).acquire()
    clock.now += 59
    with pytest.raises(Busy):
        lock(records).acquire()
    clock.now += 2
    lock(records).acquire()


def test_renew(records, clock):
    """``renew`` starts the lease again. After the end of the lease it raises ``LockLost``."""
    held = lock(records, lease=60).acquire()
    clock.now += 50
    held.renew()
    clock.now += 50
    with pytest.raises(Busy):
        lock(records).acquire()
    clock.now += 11
    with pytest.raises(LockLost):
        held.renew()


def test_late_holder(records, clock, caplog):
    """A holder whose lease has ended does not free the next holder's lock."""
    late = lock(records, lease=60).acquire()
    clock.now += 61
    lock(records, lease=60).acquire()
    late.release()
    assert "sqs_backoff.lock_outlived" in caplog.text
    with pytest.raises(Busy):
        lock(records).acquire()


def test_release_fails(records, store, caplog):
    """If a lock cannot be released, its ``with`` block still succeeds, and a warning is logged."""
    with lock(records):
        store.is_away = True
    assert "sqs_backoff.lock_not_released" in caplog.text


def test_lost_renewal(records):
    """A holder can release its lock even if the store's answer to a renewal was lost."""
    with lock(records) as held:
        record = held._record
        held.renew()
        held._record = record
    lock(records).acquire()


@pytest.mark.parametrize("lease", [0, -1, float("inf"), timedelta(0)])
def test_invalid_lease(records, lease):
    """A lock refuses an invalid lease."""
    with pytest.raises(ValueError, match="lease"):
        lock(records, lease=lease)


@pytest.mark.parametrize("key", [None, "", True, 1.5])
def test_invalid_key(records, key):
    """A lock refuses a key that is no text, int or UUID."""
    with pytest.raises((TypeError, ValueError), match="lock key"):
        Lock(records, key)


@pytest.fixture
def app():
    return make_app()


@pytest.mark.parametrize("outer", ["exclusive", "workflow"])
@pytest.mark.parametrize("inner", ["exclusive", "workflow"])
def test_enter_twice(app, outer, inner):
    """If a run enters the same lock twice, it gets an error, because it would wait for itself.

    ``exclusive`` and ``workflow`` with the same key share a lock.
    """

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with getattr(self, outer)("order:7"), getattr(self, inner)("order:7"):
            pytest.fail("it has entered twice")

    result = work.apply(task_id="A").result
    assert isinstance(result, HeldByItself)
    assert "pass on" in str(result)


@pytest.mark.parametrize("held", ["exclusive", "workflow"])
@pytest.mark.parametrize("asked", ["exclusive", "workflow"])
def test_w3_two_runs(app, held, asked):
    """Two runs are never inside the same lock or workflow at the same time."""

    @app.task(base=WorkflowTask, bind=True, name="other", max_retries=0)
    def other(self):
        with getattr(self, asked)("order:7"):
            pytest.fail("two runs at once")

    @app.task(base=WorkflowTask, bind=True)
    def holder(self):
        with getattr(self, held)("order:7"):
            return repr(other.apply(task_id="B").result)

    assert "Busy" in holder.apply(task_id="A").result


def test_enter_again(app):
    """A run may enter a lock again after it has left it."""

    @app.task(bind=True)
    def work(self):
        for _ in range(2):
            with self.exclusive("order:7") as held:
                held.renew()
        return "done"

    assert work.apply(task_id="A").result == "done"
