"""The pacer, which starts messages of a provider with a rate, each at its slot.

A slot is a time at which one call may begin. Workers get slots from a store that they share. No
message waits for a store that is away or slow.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from celery_sqs_backoff.provider.fleet import Taken
from celery_sqs_backoff.provider.gate import ProviderGate
from celery_sqs_backoff.provider.rate import HEADROOM, Times
from celery_sqs_backoff.worker import pacing
from celery_sqs_backoff.worker.pacing import Pace, Pacer
from tests.support.processes import eventually


class Waiting:
    """The part of a lease that the line of waiting messages uses."""

    has_turn = False

    def is_settled(self) -> bool:
        return False


class Store:
    """A store that hands out slots. ``there`` and ``back`` are the seconds of a call's two ways."""

    there = back = 0.0

    def __init__(self, scene: Scene) -> None:
        self.scene, self.times, self.calls = scene, Times(), 0

    def take(self, slots: int, holds: list[float], *, is_back: bool = False) -> Taken:
        self.calls += 1
        self.scene.now += self.there
        now = self.scene.now
        taken = self.times.take_slots(slots, now, 10.0)
        self.scene.now += self.back
        returns = self.times.take_returns(holds, now, 10.0)
        return Taken(taken, returns, replace(self.times), now + 1.0 if is_back else 0.0, 1)


class Scene:
    """A pacer without threads. The test does their work."""

    def __init__(self) -> None:
        self.now, self.store = 100.0, Store(self)
        self.pacer = Pacer(lambda: self.now, threading.RLock(), lambda: None)
        self.pacer._threads = [None, None]  # type: ignore[list-item]  # no thread is started
        self.began: list[float] = []

    def line(self, messages: int) -> Pace:
        pace = make_pace(10.0 / HEADROOM, self.store)
        for _ in range(messages):
            self.join(pace)
        return pace

    def join(self, pace: Pace) -> None:
        lease: Any = Waiting()

        def start() -> None:
            lease.has_turn = False  # the task has begun
            self.began.append(self.now)

        self.pacer.join(pace, lease, start, 100.0, 1e9)

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for action in self.pacer.step(self.now):
            action()

    def answer(self) -> None:
        """Ask the store for slots, as the pacer's second thread would, if slots are wanted."""
        for pace in list(self.pacer._asked):
            self.pacer.ask(pace)


def make_pace(rate: float | None, store: Any = None) -> Pace:
    rng = random.Random(0)
    return Pace("mail", rate, store, ProviderGate(rng), lambda lease, until: None, rng)


def join(pacer: Pacer, pace: Pace, start: Callable[[], object]) -> None:
    lease: Any = Waiting()
    pacer.join(pace, lease, start, 1e99, 1e99)


@pytest.mark.parametrize("way", ["there", "back"])
def test_answer_is_late(way: str) -> None:
    """Messages do not start closer together because a response of the store came late."""
    scene = Scene()
    scene.line(30)
    for number in range(200):
        setattr(scene.store, way, 0.8 if 60 < number < 120 and number % 20 == 0 else 0.001)
        scene.step(0.01)
        scene.answer()
        scene.step()
    gaps = [later - earlier for earlier, later in pairwise(scene.began)]
    assert len(gaps) > 12
    assert min(gaps) > 0.08


def test_slow_store_is_away() -> None:
    """If a call to the store hangs, the worker starts messages at its own share of the rate.

    It does so until the store responds in time.
    """
    scene = Scene()
    pace = scene.line(90)
    scene.step()  # the second thread hangs, because the test does not call answer()
    for _ in range(40):
        scene.step(0.1)
    assert pace.is_away
    # The store has not told the number of workers, so this one takes a tenth of the rate.
    assert 1 <= len(scene.began) <= 4
    scene.store.back = 1.2
    scene.answer()
    assert pace.is_away
    scene.store.back = 0.0
    scene.step(2.0)
    scene.answer()
    assert not pace.is_away


def test_own_share_hides_more() -> None:
    """While the store is away, the worker hides messages that its own share cannot start soon."""
    scene = Scene()
    pace = scene.line(300)  # 30 s at the rate of the fleet, and 300 s at a tenth of it
    scene.step()  # the second thread hangs, because the test does not call answer()
    for _ in range(40):
        scene.step(0.1)
    assert pace.is_away
    assert 90 <= len(pace.line) <= 102, "expected the messages that get a slot within 100 s"


def test_full_line_asks_rarely() -> None:
    """With many waiting messages, the pacer keeps the rate and rarely asks the store for slots."""
    scene = Scene()
    scene.line(1000)
    for _ in range(100):
        scene.step(0.1)
        scene.answer()
    assert 99 <= len(scene.began) <= 101
    assert scene.store.calls <= 101


def test_few_start_in_a_full_pool() -> None:
    """While the pool is full, the worker hands it only the calls of a fifth of a second.

    All of these calls begin together when the pool is free again.
    """
    scene, pace, started = Scene(), make_pace(30.0), list[float]()
    for _ in range(300):
        join(scene.pacer, pace, lambda: started.append(scene.now))
    for _ in range(300):
        scene.step(0.01)
    assert len(started) == 6


# The threads


def real_pacer(look: Callable[[], float | None] = lambda: None) -> Pacer:
    return Pacer(time.monotonic, threading.RLock(), look)


def test_threads_start_and_end() -> None:
    """The pacer's threads start with the first message and end when it stops."""
    pacer, started = real_pacer(), threading.Event()
    join(pacer, make_pace(100.0), started.set)
    assert started.wait(10)
    pacer.stop()
    for thread in pacer._threads:
        thread.join(10)
        assert not thread.is_alive()


def _no_thread(thread: object) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pacer cannot start its threads, it tries again at the next message.

    No message is lost.
    """
    pacer, pace, started = real_pacer(), make_pace(1e6), threading.Semaphore(0)
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", _no_thread)
        join(pacer, pace, started.release)
    join(pacer, pace, started.release)
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    pacer.stop()


def test_look_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If a look for due messages raises an error, the pacer logs its type and looks again."""
    monkeypatch.setattr(pacing, "_AFTER_FAULT_SECONDS", 0.01)
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 1:
            raise ValueError("a password")

    pacer = real_pacer(look)
    pacer.look_soon()
    eventually(lambda: len(looks) == 2)
    pacer.stop()
    assert "pacing_failed" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_is_a_fault() -> None:
    """The pacer reports a dead thread as a fault until the worker stops.

    Otherwise the worker would look healthy, but hold the waiting messages for ever.
    """
    pacer = real_pacer()
    assert pacer.fault() is None

    def end() -> None:
        raise SystemExit

    join(pacer, make_pace(1e6), end)
    eventually(lambda: pacer.fault() == "the thread sqs-pace has died")
    pacer.stop()
    assert pacer.fault() is None
