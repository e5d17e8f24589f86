"""One holder at a time, until its lease ends; and a token that only grows."""

from __future__ import annotations

import copy
import itertools
import logging
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_sqs_backoff.safe.errors import (
    Busy,
    LockLost,
    StoreInTransaction,
    StoreUnavailable,
)
from celery_sqs_backoff.safe.lock import Lock
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import KEEP_SECONDS
from tests.support.fake_sqs import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.mark.parametrize("lease", [0, -1, None, "5m", float("inf"), float("nan"), timedelta.max])
def test_a_lease_that_no_store_could_keep_is_refused(store: MemoryStore, lease: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="invalid lease"):
        Lock(store, "a", lease=lease)


def test_a_lease_may_be_a_timedelta(store: MemoryStore, clock: Clock) -> None:
    Lock(store, "a", lease=timedelta(seconds=10)).acquire()
    clock.now = 10
    Lock(store, "a").acquire()


def test_one_holder_at_a_time(store: MemoryStore) -> None:
    with Lock(store, "a"):
        with pytest.raises(Busy):
            Lock(store, "a").acquire()
        with Lock(store, "b"):
            pass
    with Lock(store, "a"):
        pass


def test_the_lock_is_free_after_a_failure_too(store: MemoryStore) -> None:
    with pytest.raises(ZeroDivisionError), Lock(store, "a"):
        raise ZeroDivisionError
    Lock(store, "a").acquire()


def test_a_holder_that_was_killed_holds_it_for_its_lease(store: MemoryStore, clock: Clock) -> None:
    Lock(store, "a", lease=10).acquire()
    clock.now = 9.9
    with pytest.raises(Busy):
        Lock(store, "a").acquire()
    clock.now = 10
    Lock(store, "a").acquire()


def test_renewing_begins_the_lease_anew(store: MemoryStore, clock: Clock) -> None:
    lock = Lock(store, "a", lease=10).acquire()
    clock.now = 9
    lock.renew()
    clock.now = 18
    with pytest.raises(Busy):
        Lock(store, "a").acquire()


def test_a_lease_that_is_over_is_not_renewed(store: MemoryStore, clock: Clock) -> None:
    lock = Lock(store, "a", lease=10).acquire()
    clock.now = 10
    with pytest.raises(LockLost):
        lock.renew()
    Lock(store, "a").acquire()
    with pytest.raises(LockLost):
        lock.renew()


def test_a_late_holder_does_not_free_the_next_ones_lock(
    store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    late = Lock(store, "a", lease=10).acquire()
    clock.now = 10
    Lock(store, "a", lease=10).acquire()
    with caplog.at_level(logging.WARNING):
        late.release()
    assert "lock_outlived" in caplog.text
    with pytest.raises(Busy):
        Lock(store, "a").acquire()


def test_tokens_grow_with_every_holder(store: MemoryStore, clock: Clock) -> None:
    tokens = []
    for _ in range(3):
        with Lock(store, "a", lease=10, clock=clock) as lock:
            tokens.append(lock.token)
    Lock(store, "a", lease=10, clock=clock).acquire()
    assert tokens == [1, 2, 3]
    clock.now += 10
    assert Lock(store, "a", clock=clock).acquire().token > 4


@pytest.mark.parametrize("store_forgets", ["by its end", "all"])
def test_tokens_grow_when_the_store_forgets(clock: Clock, store_forgets: str) -> None:
    """Else who remembers the highest token would refuse every holder from then on."""
    clock.now = 1_700_000_000
    store = MemoryStore(clock=clock)
    for _ in range(50):
        with Lock(store, "a", lease=10, clock=clock) as before:
            pass
    if store_forgets == "all":
        store = MemoryStore(clock=clock)
        clock.now += 1
    else:
        clock.now += KEEP_SECONDS
    assert Lock(store, "a", clock=clock).acquire().token > before.token


def test_tokens_grow_when_the_store_loses_its_last_writes(clock: Clock) -> None:
    """As a Redis replica may that takes over."""
    store = MemoryStore(clock=clock)
    clock.now = 1_700_000_000
    with Lock(store, "a", lease=10, clock=clock):
        replica = copy.copy(store._records)
    with Lock(store, "a", lease=10, clock=clock) as lost:
        pass
    store._records = {key: value for key, value in replica.items() if "token" in key}
    clock.now += 1
    assert Lock(store, "a", clock=clock).acquire().token > lost.token


@pytest.mark.parametrize(("in_use", "grows"), [(9.0, False), (11.0, True)])
def test_after_a_loss_a_clock_that_is_behind_matters_only_to_a_young_lock(
    in_use: float, grows: bool
) -> None:
    """10 s behind: what the documentation says of tokens, precisely."""
    first = Lock(MemoryStore(), "a", clock=lambda: 1_700_000_000).acquire()
    behind = Lock(MemoryStore(), "a", clock=lambda: 1_700_000_000 + in_use - 10).acquire()
    assert (behind.token > first.token) is grows


def test_a_clock_that_goes_back_does_not_take_tokens_back(store: MemoryStore, clock: Clock) -> None:
    with Lock(store, "a", clock=lambda: 1_700_000_000) as before:
        pass
    assert Lock(store, "a", clock=clock).acquire().token == before.token + 1


def test_a_holder_that_pauses_before_its_token_does_not_get_a_higher_one(
    store: MemoryStore, clock: Clock
) -> None:
    """Else what it writes late would be taken for newer than the next holder's."""

    class Pausing:
        paused = False

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def add(self, key: str, value: str, ttl: float) -> str | None:
            if "token" in key and not self.paused:
                self.paused = True
                clock.now += 11
                assert Lock(store, "a", lease=60).acquire().token
            return store.add(key, value, ttl)

    with pytest.raises(Busy):
        Lock(Pausing(), "a", lease=10).acquire()


def test_a_store_that_is_away_at_the_end_does_not_fail_the_body(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> bool:
        raise StoreUnavailable("away")

    with caplog.at_level(logging.WARNING), Lock(store, "a") as lock:
        monkeypatch.setattr(store, "delete", away)
        monkeypatch.setattr(store, "replace", away)
        with pytest.raises(LockLost):
            lock.renew()
    assert "lock_not_released" in caplog.text


def test_a_body_that_is_done_does_not_fail_by_its_release(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``autoretry_for=(Exception,)`` would do it again."""

    def cut_short(*_: object) -> bool:
        raise SoftTimeLimitExceeded

    with Lock(store, "a"):
        monkeypatch.setattr(store, "delete", cut_short)


def test_a_renewal_whose_answer_was_lost_does_not_keep_the_lock_from_being_freed(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run of the message would find the lock held for a whole lease."""
    replace = store.replace

    def lost(*arguments: Any) -> bool:
        replace(*arguments)
        raise StoreUnavailable("no answer")

    with Lock(store, "a", clock=itertools.count().__next__) as lock:
        monkeypatch.setattr(store, "replace", lost)
        with pytest.raises(StoreUnavailable):
            lock.extend()
        monkeypatch.undo()
    with Lock(store, "a"):
        pass


def test_a_body_that_leaves_a_transaction_open_raises_its_own_error(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inside(*_: object) -> bool:
        raise StoreInTransaction("inside")

    def body() -> None:
        with Lock(store, "a"):
            monkeypatch.setattr(store, "delete", inside)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


@pytest.mark.parametrize("lease", [0, -1, float("nan")])
def test_a_lease_must_be_above_0(store: MemoryStore, lease: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        Lock(store, "a", lease=lease)
