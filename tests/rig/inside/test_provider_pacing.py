"""Messages in line for slots: nothing waits for a store that is away or slow."""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from celery_sqs_backoff.provider.fleet import Taken, present_seconds
from celery_sqs_backoff.provider.gate import ProviderGate
from celery_sqs_backoff.provider.rate import HEADROOM, NEW_SECONDS, Place, Times, assign
from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.worker import pacing
from celery_sqs_backoff.worker.pacing import Pace, Paced, Pacer
from tests.support.processes import eventually


def well() -> ProviderGate:
    """Return the gate of a provider that is well."""
    return ProviderGate(random.Random(0))


def real_pacer() -> Pacer:
    return Pacer(time.monotonic, threading.RLock(), lambda: None)


class Fleet:
    """A store's end: it gives slots at once, or fails."""

    def __init__(self, *, workers: int = 4) -> None:
        self.workers = workers
        self.asked: list[int] = []
        self.error: Exception | None = None

    def take(self, longest: Any) -> Taken:
        self.asked.append(len(longest))
        if self.error is not None:
            raise self.error
        return Taken([Place(i / 10, is_slot=True) for i in range(len(longest))], self.workers)


class Scene:
    """A pacer whose threads are the test, and a pool: what starts begins, while processes do."""

    def __init__(self, fleet: Fleet | None, *, rate: float = 10.0 / HEADROOM) -> None:
        self.now = 100.0
        self.fleet = fleet
        self.begins = True
        self.pacer = Pacer(lambda: self.now, threading.RLock(), lambda: None)
        self.pacer._threads = [None, None]  # type: ignore[list-item]  # none is started
        self.pace = Pace("mail", rate, fleet, well())
        self.started: list[str] = []
        self.outstanding: set[str] = set()
        self.settled: set[str] = set()

    def join(self, *names: str) -> None:
        for name in names:
            paced = Paced(
                functools.partial(self._start, name),
                lambda until: None,
                functools.partial(self.settled.__contains__, name),
                functools.partial(self.outstanding.__contains__, name),
            )
            self.pacer.join(self.pace, paced, 100.0)

    def _start(self, name: str, slot: float) -> None:
        self.started.append(name)
        if not self.begins:
            self.outstanding.add(name)

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for action in self.pacer.step(self.now):
            action()

    def answer(self) -> None:
        """The other thread asks the store, if it is to be asked."""
        for pace in list(self.pacer._to_ask):
            del self.pacer._to_ask[pace]
            away = pace.away_until
            self.pacer.ask(pace, [] if away is not None else pace.lacking(self.now))


def test_one_call_for_all_messages_in_line() -> None:
    fleet = Fleet()
    scene = Scene(fleet)
    scene.join("a", "b", "c")
    scene.step()
    scene.answer()
    scene.step()
    scene.step(0.101)
    scene.step(0.101)
    assert fleet.asked == [3]
    assert scene.started == ["a", "b", "c"]


def test_calls_that_waited_for_a_process_do_not_begin_all_at_once() -> None:
    """The provider hangs for a while, and its calls take up the pool: then all processes are free.

    What waited in the pool, up to its whole prefetch window, made all its calls in that second.
    """
    scene = Scene(None)
    scene.begins = False
    scene.join(*map(str, range(40)))
    for _ in range(30):
        scene.step(0.1)
    assert len(scene.started) == 10, "a second's calls wait for a process"
    scene.begins = True
    scene.outstanding.clear()
    for _ in range(10):
        scene.step(0.1)
    assert 9 <= len(scene.started) - 10 <= 11, "10/s"
    for _ in range(40):
        scene.step(0.1)
    assert sorted(map(int, scene.started)) == list(range(40)), "each once"


def test_messages_start_although_other_tasks_fill_the_pool() -> None:
    """Others may fill the prefetch window for hours; those in line wait with them."""
    scene = Scene(None, rate=1.0 / HEADROOM)
    scene.begins = False
    scene.join("a", "b")
    for _ in range(50):
        scene.step(0.1)
    assert scene.started == ["a"], "in the pool's own line"
    scene.outstanding.clear()
    for _ in range(11):
        scene.step(0.1)
    assert scene.started == ["a", "b"]


def test_a_worker_that_is_stuck_takes_few_slots_of_the_fleet() -> None:
    fleet = Fleet(workers=4)
    scene = Scene(fleet)
    scene.begins = False
    scene.join(*map(str, range(5)))
    for number in range(100):
        scene.join(f"later {number}")
        scene.step(0.1)
        scene.answer()
    assert len(scene.started) == scene.pace.most == 3
    assert sum(fleet.asked) <= 5 + 5, "until the first slot was lost"
    assert scene.pace.is_behind


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_was_stuck_asks_for_a_slot_for_each_task_that_begins(seed: int) -> None:
    """Whatever happens to messages: it must not be behind for ever, or have lost count of them."""
    rng, fleet = random.Random(seed), Fleet(workers=4)
    scene = Scene(fleet)
    for number in range(600):
        scene.begins = rng.random() < 0.2
        if number < 400:
            scene.join(str(number))
        if scene.outstanding and rng.random() < 0.7:
            scene.outstanding.remove(rng.choice(sorted(scene.outstanding)))
        if rng.random() < 0.2:
            scene.settled.add(str(rng.randrange(400)))
        scene.step(rng.choice([0.02, 0.1, 0.3]))
        scene.answer()
        assert len(scene.outstanding) <= scene.pace.most
    scene.begins = True
    scene.outstanding.clear()
    for _ in range(200):
        scene.step(0.1)
        scene.answer()
    assert {str(number) for number in range(400)} <= {*scene.started, *scene.settled}
    assert len(set(scene.started)) == len(scene.started), "each once"
    assert not scene.pace.is_behind
    scene.pace.note_begun()
    assert scene.pace.room == scene.pace.most


def test_a_store_that_is_away_costs_a_share_of_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(workers=4)
    scene = Scene(fleet)
    scene.join("first")
    scene.step()
    scene.answer()
    scene.step()
    fleet.error = StoreUnavailable("a password")
    scene.join(*map(str, range(20)))
    scene.step()
    with caplog.at_level(logging.INFO):
        scene.answer()
        for _ in range(20):
            scene.step(0.2)
    assert 4 <= len(scene.started) - 1 <= 6, "2 s for the fleet's slots, 2 s at a quarter of 10/s"
    assert "rate_store_away" in caplog.text
    assert "password" not in caplog.text


def test_a_worker_that_was_idle_does_not_take_itself_for_the_whole_fleet() -> None:
    """By day one message now and then, each in another worker; at night a batch, and no store."""
    fleet = Fleet(workers=1)
    scene = Scene(fleet)
    scene.join("by day")
    scene.step()
    scene.answer()
    scene.step()
    fleet.error = StoreUnavailable("away")
    scene.now += present_seconds(scene.pace.rate) + 1
    scene.join(*map(str, range(50)))
    scene.step()
    scene.answer()
    for _ in range(40):
        scene.step(0.1)
    assert 1 <= len(scene.started) - 1 <= 3, "2 s for the fleet's slots, 2 s at a tenth of 10/s"


def test_a_slow_store_is_not_waited_for() -> None:
    scene = Scene(Fleet())
    scene.join("a")
    scene.step()  # and the other thread hangs
    assert scene.started == []
    scene.step(pacing._PATIENCE_SECONDS + 0.1)
    scene.step(1.0)
    assert scene.started == ["a"]


def test_a_store_that_answers_one_tenant_after_another_is_not_away() -> None:
    scene = Scene(Fleet())
    tenants = [Pace(f"mail[{i}]", 10.0, scene.fleet, well()) for i in range(300)]
    waiting = Paced(lambda slot: None, lambda until: None, lambda: False)
    for pace in tenants:
        scene.pacer.join(pace, waiting, 9.0)
    scene.step()
    for pace in tenants:
        scene.now += 0.01
        scene.step()
        assert pace.away_until is None
        scene.pacer.ask(pace, pace.lacking(scene.now))


def test_a_store_that_answers_too_slowly_for_all_tenants_is_away_for_the_last() -> None:
    scene = Scene(Fleet())
    tenants = [Pace(f"mail[{i}]", 10.0, scene.fleet, well()) for i in range(30)]
    waiting = Paced(lambda slot: None, lambda until: None, lambda: False)
    for pace in tenants:
        scene.pacer.join(pace, waiting, 9.0)
    scene.step()
    for pace in tenants:
        scene.now += 0.9 * pacing._PATIENCE_SECONDS
        scene.step()
        if pace.away_until is None:
            scene.pacer.ask(pace, pace.lacking(scene.now))
            scene.step()
    assert tenants[0].away_until is None
    assert tenants[-1].away_until is not None
    assert all(not len(pace.line) for pace in tenants), "nobody waits for longer"


def test_a_store_that_is_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.error = StoreUnavailable("away")
    scene = Scene(fleet)
    scene.join("a")
    scene.step()
    scene.answer()
    scene.step()
    fleet.error = None
    scene.join("b")
    for _ in range(40):
        scene.step(0.1)
    assert "b" in scene.started, "it does not wait for the answer"
    scene.join("c")
    scene.step()
    with caplog.at_level(logging.INFO):
        scene.answer()
    assert "rate_shared_again" in caplog.text
    scene.step(1.0)
    scene.answer()
    assert fleet.asked == [1, 0, 1]


def test_slots_of_the_store_and_of_this_worker_do_not_add_up() -> None:
    class Slots(Fleet):
        times = Times()

        def take(self, longest: Any) -> Taken:
            super().take(longest)  # which may fail
            places, self.times = assign(self.times, scene.now, longest, rate=10.0)
            return Taken([Place(each.at - scene.now, each.is_slot) for each in places], 1)

    fleet = Slots()
    scene = Scene(fleet)

    def started_in_a_second() -> int:
        before = len(scene.started)
        for _ in range(10):
            scene.join(*"ab")
            scene.step(0.1)
            if scene.pace.away_until is None:
                scene.answer()
        return len(scene.started) - before

    assert [started_in_a_second() for _ in range(3)] == [10, 10, 10]
    fleet.error = StoreUnavailable("away")
    assert max(started_in_a_second() for _ in range(8)) <= 11
    fleet.error = None
    scene.now += pacing._AWAY_SECONDS
    scene.join("a")
    scene.step()
    scene.answer()
    assert scene.pace.away_until is None
    assert max(started_in_a_second() for _ in range(5)) <= 11


class Remote(Fleet):
    """A store with a clock of its own, far from this worker's by the seconds of each call."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(workers=1)
        self.scene, self.there, self.back, self.times = scene, 0.001, 0.001, Times()

    def take(self, longest: Any) -> Taken:
        self.scene.now += self.there
        now = self.scene.now + 1e9
        places, self.times = assign(self.times, now, longest, rate=10.0)
        self.scene.now += self.back
        return Taken([Place(each.at - now, each.is_slot) for each in places], 1, now)


def remote() -> tuple[Scene, Remote]:
    scene = Scene(None)
    fleet = Remote(scene)
    scene.fleet = scene.pace.fleet = fleet
    return scene, fleet


def test_slots_that_a_late_answer_brings_begin_one_by_one() -> None:
    """All together, they and the slots of others would be more calls than agreed."""
    scene, fleet = remote()
    fleet.back = 0.8
    scene.join(*"abcdefghij")
    scene.step()
    scene.answer()
    begun = [0]
    for _ in range(120):
        scene.step(0.01)
        begun.append(len(scene.started))
    assert max(later - before for before, later in zip(begun, begun[10:], strict=False)) <= 2
    assert begun[-1] == 10


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_slot_begins_at_its_time_however_long_the_answer_took(way: str) -> None:
    """What a fast answer has shown of the store's clock holds for a slow one."""
    scene, fleet = remote()
    scene.join("a")
    scene.step()
    scene.answer()
    scene.step()
    setattr(fleet, way, 0.4)
    scene.join(*"bcdefghij")
    scene.step()
    scene.answer()
    slots = sorted(scene.pace.line._slots)
    last_slot = fleet.times.free_at - 0.1 - 1e9
    assert slots[-1] == pytest.approx(max(last_slot, slots[0] + 0.8), abs=0.005)


def test_workers_that_lose_the_store_do_not_begin_in_one_moment() -> None:
    """Each keeps in step with its last slot of the fleet."""
    at = []
    for number in range(4):
        pace = Pace("mail", 20.0, Fleet(), well())
        pace.workers = 4
        pace.give_shared([], Taken([Place(number / pace.rate, is_slot=True)], 4), 100.0, 100.0)
        pace.leave_fleet(101.0)
        at.append(pace.times.free_at)
    at.sort()
    assert at[0] >= 101.0 + NEW_SECONDS
    assert all(later - earlier >= 1 / 20 for earlier, later in pairwise(at))
    assert at[-1] - at[0] < 1 / 4.75


def test_a_worker_that_asks_late_for_its_share_makes_up_for_it() -> None:
    """After the store's return each asks for its share. A busy machine cost a third of the rate."""
    scene, _ = remote()
    scene.pace.workers, scene.pace.keeps_share_until = 1, math.inf
    for number in range(400):
        scene.join(str(number))
    until = scene.now + 10.0
    while scene.now < until:
        scene.step(0.03)
        scene.answer()
    assert 92 <= len(scene.started) <= 101


def test_a_store_that_answers_too_late_each_time_stays_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(Fleet):
        def take(self, longest: Any) -> Taken:
            scene.step(pacing._PATIENCE_SECONDS + 0.1)
            return super().take(longest)

    scene = Scene(Slow(workers=2))
    with caplog.at_level(logging.INFO):
        for number in range(100):
            scene.join(str(number))
            scene.step(0.2)
            scene.answer()
    assert caplog.text.count("rate_store_away") == 1
    assert "rate_shared_again" not in caplog.text


def test_without_a_store_no_one_is_asked() -> None:
    scene = Scene(None)
    scene.join("a", "b")
    scene.step()
    scene.step(0.1)
    assert scene.started == ["a", "b"]
    assert scene.pacer._pause() is None


def test_the_threads_let_messages_start_and_end() -> None:
    pacer = real_pacer()
    started = threading.Event()
    pacer.join(
        Pace("mail", 100.0, Fleet(), well()),
        Paced(lambda slot: started.set(), lambda until: None, lambda: False),
        9.0,
    )
    assert started.wait(10)
    pacer.stop()
    for thread in pacer._threads:
        thread.join(10)
        assert not thread.is_alive()


def _no_thread(thread: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_machine_without_threads_loses_no_message_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pacer, pace, started = (
        real_pacer(),
        Pace("mail", 1e6, None, well()),
        threading.Semaphore(0),
    )

    def paced() -> Paced:
        return Paced(lambda slot: started.release(), lambda until: None, lambda: False)

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", _no_thread)
        pacer.join(pace, paced(), 9.0)
    pacer.join(pace, paced(), 9.0)
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    pacer.stop()
    for thread in pacer._threads:
        thread.join(10)


def test_a_slot_that_is_further_away_than_a_thread_can_sleep() -> None:
    scene = Scene(None, rate=1e-12)
    scene.join("a")
    scene.pacer.join(scene.pace, Paced(lambda slot: None, lambda until: None, lambda: False), 1e99)
    scene.step()
    pause = scene.pacer._pause()
    assert pause is not None
    assert pause <= threading.TIMEOUT_MAX


def test_a_late_answer_gives_no_places_to_messages_it_was_not_asked_for() -> None:
    """One that must not be hidden might be: SQS would move it at its next receive."""
    hidden: list[float] = []

    class Late(Fleet):
        def take(self, longest: Any) -> Taken:
            scene.step(pacing._PATIENCE_SECONDS + 0.1)
            scene.step()  # the message has a place of this worker's own
            must_stay = Paced(lambda slot: None, hidden.append, lambda: False)
            scene.pacer.join(scene.pace, must_stay, math.inf)
            return Taken([Place(60.0, is_slot=False) for _ in longest], self.workers)

    scene = Scene(Late())
    scene.join("a")
    scene.step()
    scene.answer()
    scene.step()
    assert not hidden


def test_a_look_for_hidden_messages_that_fails_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pacing, "_AFTER_FAULT_SECONDS", 0.01)
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 1:
            raise ValueError("a password")

    pacer = Pacer(time.monotonic, threading.RLock(), look)
    pacer.look_soon()
    eventually(lambda: len(looks) == 2)
    pacer.stop()
    assert "pacing_failed" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_a_fault_until_the_worker_stops() -> None:
    """What is in line would be held for ever, by a worker that looks alive."""
    pacer, pace = (
        real_pacer(),
        Pace("mail", 1e6, None, well()),
    )
    assert pacer.fault() is None

    def ends() -> None:
        raise SystemExit

    pacer.join(pace, Paced(lambda slot: ends(), lambda until: None, lambda: False), 100.0)
    eventually(lambda: pacer.fault() == "the thread sqs-pace has died")
    pacer.stop()
    assert pacer.fault() is None
