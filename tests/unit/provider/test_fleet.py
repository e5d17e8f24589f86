"""Slots that workers share in a store: the same ones from Redis's script and from plain writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_sqs_backoff.provider.fleet import (
    APART_SECONDS,
    FleetSlots,
    Taken,
    advance,
    present_seconds,
)
from celery_sqs_backoff.provider.rate import Times, assign
from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.redis import RedisStore
from tests.support.redis_database import redis_url

REDIS = redis_url()

Fleet = Callable[..., FleetSlots]


class Counting:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return method(*args, **kwargs)

        return counted


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def store(request):
    return MemoryStore() if request.param == "memory" else RedisStore(REDIS)


@pytest.fixture
def fleet(store):
    records = Records(store, namespace=f"test {uuid4().hex}", secrets=["secret"])

    def make(worker, *, rate=10.0, name=("mail",)):
        return FleetSlots(records, name, rate=rate, worker=worker)

    yield make
    if isinstance(store, RedisStore):
        made = redis.Redis.from_url(REDIS)
        for key in made.scan_iter("celery-sqs-backoff:rate:*"):
            made.delete(key)


def wait(taken: Taken) -> float:
    """Seconds until the first slot."""
    return taken.assigned.slots[0] - taken.now


def test_workers_get_different_slots_at_one_rate(fleet):
    first, second, third = fleet("a").take(3), fleet("b").take(2), fleet("a").take(1)
    assert wait(first) == pytest.approx(0.0, abs=0.05)
    assert wait(second) == pytest.approx(0.3, abs=0.1)
    assert wait(third) == pytest.approx(0.5, abs=0.1)
    assert (first.workers, second.workers, third.workers) == (1, 2, 2)


def test_every_store_assigns_as_the_arithmetic_does(fleet):
    worker, times, began = fleet("a"), Times(), 0.0
    for slots, returns, within in ((3, 0, 9), (0, 2, 9), (99, 3, 9), (1, 1, 9), (0, 9, 2)):
        taken = worker.take(slots, returns, within=within)
        began = began or taken.now
        expected = assign(times, 0.0, slots=slots, returns=returns, rate=10.0, within=within)
        times, found = expected.times, taken.assigned
        assert [at - began for at in found.slots] == pytest.approx(expected.slots, abs=0.08)
        assert [at - began for at in found.returns] == pytest.approx(expected.returns, abs=0.08)


def test_a_worker_that_is_back_lets_all_keep_to_their_shares(fleet):
    """The others may still make their shares of the rate: slots would come on top."""
    first, second = fleet("a"), fleet("b")
    assert second.take(1).apart_until <= second.take(1).now
    back = first.take(0, is_back=True)
    assert back.apart_until - back.now == pytest.approx(APART_SECONDS, abs=0.01)
    told = second.take(5, 1)
    assert (told.assigned.slots, len(told.assigned.returns)) == ([], 1)
    assert told.apart_until == pytest.approx(back.apart_until, abs=0.01)
    later = second.take(0, is_back=True)
    assert later.apart_until == pytest.approx(back.apart_until, abs=0.01), "not once more"


def test_providers_and_tenants_do_not_share_slots(fleet):
    fleet("a").take(9)
    assert wait(fleet("a", name=("mail", "tenant")).take(1)) < 0.5
    assert wait(fleet("a", name=("sms",)).take(1)) < 0.5


def test_a_fleet_of_threads_takes_each_slot_once(fleet):
    workers = [fleet(str(n), rate=1000.0) for n in range(6)]
    slots = []

    def take(worker):
        for _ in range(10):
            slots.extend(worker.take(10).assigned.slots)

    threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots.sort()
    assert len(slots) == 600
    assert min(later - earlier for earlier, later in pairwise(slots)) >= 0.0009


@pytest.mark.redis
def test_redis_is_asked_once_for_all_slots():
    store = Counting(RedisStore(REDIS))
    slots = FleetSlots(
        Records(store, namespace=uuid4().hex),
        ("mail",),
        rate=50.0,
        worker="a",
    )
    slots.take(1)
    slots.take(8)
    assert store.calls == 2


def test_other_stores_take_one_write_while_nobody_else_is_faster():
    class Plain(Counting):
        def __getattr__(self, name):
            if name == "run_script":
                raise AttributeError(name)
            return super().__getattr__(name)

    store = Plain(MemoryStore())
    records = Records(store, namespace=uuid4().hex)
    first, second = (FleetSlots(records, ("mail",), rate=50.0, worker=name) for name in "ab")
    for _ in range(5):
        first.take(3)
    assert store.calls == 5
    second.take(1)
    assert store.calls <= 5 + 3


@pytest.mark.parametrize("skew", [60.0, -60.0])
def test_a_worker_whose_clock_is_a_minute_off_takes_its_slots_like_the_others(skew):
    """One that lags behind would get slots a minute away as long as the others take any."""
    clock = [1e9]
    records = Records(MemoryStore(), namespace="x")
    right, wrong = (
        FleetSlots(
            records, ("mail",), rate=10.0, worker=str(off), now=lambda off=off: clock[0] + off
        )
        for off in (0.0, skew)
    )
    waits = []
    for _ in range(300):
        for worker in (right, wrong):
            waits.append(wait(worker.take(1)))
        clock[0] += 0.25
    assert max(waits[2:]) < 0.5, "from when each has read the other's time"
    assert min(waits[-100:]) >= 0


def test_who_is_never_fast_enough_gives_up():
    class Contended(MemoryStore):
        def replace(self, key, old, new, ttl):
            return False

    records = Records(Contended(), namespace="x")
    FleetSlots(records, ("mail",), rate=1.0, worker="a").take(1)
    with pytest.raises(StoreUnavailable):
        FleetSlots(records, ("mail",), rate=1.0, worker="b").take(1)


def test_workers_that_have_gone_do_not_count():
    record, taken = advance(None, "a", 1, rate=10.0, now=1000.0)
    assert taken.workers == 1
    record, taken = advance(record, "b", 1, rate=10.0, now=1001.0)
    assert taken.workers == 2
    _, taken = advance(record, "b", 1, rate=10.0, now=1002.0 + present_seconds(10.0))
    assert taken.workers == 1
