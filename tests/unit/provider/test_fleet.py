"""Slots that workers share in a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from uuid import uuid4

import pytest
import redis

from celery_sqs_backoff.provider.fleet import APART_SECONDS, FleetSlots, present_seconds
from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.redis import RedisStore
from tests.support.redis_database import redis_url

REDIS = redis_url()

Fleet = Callable[..., FleetSlots]


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def store(request):
    return MemoryStore() if request.param == "memory" else RedisStore(REDIS)


@pytest.fixture
def fleet(store, monkeypatch):
    """Make workers whose clocks agree, however busy the machine is."""
    monkeypatch.setattr("time.time", lambda: 1e9)
    records = Records(store, namespace=f"test {uuid4().hex}", secrets=["secret"])

    def make(worker, *, rate=10.0, name=("mail",), clock=lambda: 100.0):
        return FleetSlots(records, name, rate=rate, worker=worker, clock=clock)

    yield make
    if isinstance(store, RedisStore):
        made = redis.Redis.from_url(REDIS)
        for key in made.scan_iter("celery-sqs-backoff:rate:*"):
            made.delete(key)


def test_workers_share_rate(fleet):
    """Workers get different slots at one rate."""
    first, second, third = fleet("a").take(3), fleet("b").take(2), fleet("a").take(1)
    assert first.slots == pytest.approx([100.0, 100.1, 100.2], abs=1e-3)
    assert second.slots == pytest.approx([100.3, 100.4], abs=1e-3)
    assert third.slots == pytest.approx([100.5], abs=1e-3)
    assert (first.workers, second.workers, third.workers) == (1, 2, 2)


def test_worker_is_back(fleet):
    """When a worker is back, all workers keep to their shares for a while.

    The others may still use their shares of the rate, and slots would come on top.
    """
    first, second = fleet("a"), fleet("b")
    assert second.take(1).apart_until <= 100.0
    back = first.take(0, is_back=True)
    assert back.apart_until == pytest.approx(100.0 + APART_SECONDS, abs=1e-3)
    told = second.take(5, [60.0])
    assert told.slots == []
    assert told.returns == pytest.approx([100.1], abs=1e-3)
    assert told.apart_until == pytest.approx(back.apart_until, abs=1e-3)
    later = second.take(0, is_back=True)
    assert later.apart_until == pytest.approx(back.apart_until, abs=1e-3), "not once more"


def test_separate_slots(fleet):
    """Providers and tenants do not share slots."""
    fleet("a").take(9)
    assert fleet("a", name=("mail", "tenant")).take(1).slots[0] < 100.5
    assert fleet("a", name=("sms",)).take(1).slots[0] < 100.5


def test_threads_take_slots(fleet):
    """Workers in several threads take each slot once."""
    workers = [fleet(str(n), rate=1000.0, clock=time.monotonic) for n in range(6)]
    slots = []

    def take(worker):
        for _ in range(10):
            slots.extend(at + worker._ahead for at in worker.take(10).slots)

    threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots.sort()
    assert len(slots) == 600
    assert min(later - earlier for earlier, later in pairwise(slots)) >= 0.0009


def test_worker_without_slots_reads(fleet, store, monkeypatch):
    """A worker that gets no slots only reads the store.

    Otherwise, fifty workers that wait for slots would delay those that take some.
    """
    busy, idle = fleet("a"), fleet("b")
    idle.take(0)
    busy.take(99)
    monkeypatch.setattr(store, "replace", lambda *_: pytest.fail("it has written"))
    assert idle.take(5).slots == []


@pytest.mark.parametrize("skew", [60.0, -60.0])
def test_clock_skew(monkeypatch, skew):
    """A worker whose clock is a minute off takes its slots like the others.

    If its clock lags behind, it would get slots a minute away as long as the others take any.
    """
    now, records, workers = [0.0], Records(MemoryStore(), namespace="x"), []
    for off in (0.0, skew):
        monkeypatch.setattr("time.time", lambda off=off: 1e9 + off)
        workers.append(
            FleetSlots(records, ("mail",), rate=10.0, worker=str(off), clock=lambda: now[0])
        )
    waits = []
    for _ in range(300):
        for worker in workers:
            waits.append(worker.take(1).slots[0] - now[0])
        now[0] += 0.25
    assert max(waits[2:]) < 0.5, "from when each has read the other's time"
    assert min(waits[-100:]) >= 0


def test_always_too_slow(fleet, store, monkeypatch):
    """A worker whose every write conflicts with others gives up."""
    monkeypatch.setattr(store, "replace", lambda *_: False)
    fleet("a").take(1)
    with pytest.raises(StoreUnavailable):
        fleet("b").take(1)


def test_gone_workers(fleet):
    """Workers that have gone do not count."""
    now = [100.0]
    assert fleet("a").take(1).workers == 1
    later = fleet("b", clock=lambda: now[0])
    assert later.take(1).workers == 2
    now[0] += present_seconds(10.0) + 1.0
    assert later.take(1).workers == 1
