"""Workers that tell each other: one finds out and probes for all, none depends on the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from celery_sqs_backoff import FullJitter, Outcome
from celery_sqs_backoff.provider.control import Control
from celery_sqs_backoff.provider.health import State, Thresholds
from celery_sqs_backoff.provider.recall import Hidden
from celery_sqs_backoff.provider.shared import PERMIT_SECONDS, SharedHealth, Word
from celery_sqs_backoff.safe.errors import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.worker.sharing import Sharing


class Store(MemoryStore):
    """A store with the workers' clock, which may be away."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.is_away = False

    def get(self, key: str) -> str | None:
        if self.is_away:
            raise StoreUnavailable("away")
        return super().get(key)


class Worker:
    """A control, and the thread's work without the thread."""

    def __init__(self, fleet: Fleet, name: str, seed: int) -> None:
        self.fleet = fleet
        self.control = Control(Thresholds(), Random(seed))
        self.sharing = Sharing(
            fleet.store,
            lock=threading.RLock(),
            clock=lambda: fleet.now,
            worker=name,
            wake=lambda gate: None,
        )
        self.sharing._thread = threading.current_thread()  # none is started: the test ticks
        self.sharing.add(self, ("mail",))  # type: ignore[arg-type]
        #: Seconds by which this machine's clock is wrong.
        self.skew = 0.0

    @property
    def state(self) -> State:
        return self.control.health.state

    def run(self, message: str, outcome: Outcome | None) -> bool:
        look = self.control.look(
            message,
            self.fleet.now,
            policy=FullJitter(),
            looks=1,
            longest=9999.0,
            ahead=0,
            longest_wait=2.0,
        )
        if look.runs:
            self.control.ended(message, outcome, self.fleet.now)
        return look.runs

    def outage(self) -> None:
        for number in range(6):
            self.run(f"first {number}", Outcome.RETRYABLE)
        assert self.state is State.OPEN


class Fleet:
    def __init__(self, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.store = Store(lambda: self.now)
        self.skew = 0.0
        monkeypatch.setattr(
            "celery_sqs_backoff.worker.sharing.time.time", lambda: self.now + 5e8 + self.skew
        )
        self.workers = [Worker(self, f"worker {n}", n) for n in range(workers)]

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for worker in self.workers:
            self.skew = worker.skew
            worker.sharing.tick()

    def states(self) -> set[State]:
        return {worker.state for worker in self.workers}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(4, monkeypatch)


def test_all_learn_that_the_provider_is_down_and_that_it_is_back(fleet: Fleet) -> None:
    fleet.workers[0].outage()
    fleet.tick()
    fleet.tick()
    assert fleet.states() == {State.OPEN}
    for _ in range(30):
        fleet.tick()
        for number, worker in enumerate(fleet.workers):
            worker.run(f"{number}", None)
    assert fleet.states() == {State.CLOSED}


def test_one_probes_for_all(fleet: Fleet) -> None:
    """An hour of outage: about one probe a minute, not one per worker."""
    fleet.workers[0].outage()
    probes = 0
    for second in range(3600):
        fleet.tick()
        for number, worker in enumerate(fleet.workers):
            probes += worker.run(f"{second} {number}", Outcome.RETRYABLE)
    assert 40 <= probes <= 100


@pytest.mark.parametrize("seed", range(5))
def test_the_permit_goes_to_a_worker_that_has_a_message_to_probe_with(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Ten workers, of which one has hidden the only messages: the others cannot probe."""
    fleet, rng = Fleet(10, monkeypatch), Random(seed)
    holder, *_ = workers = fleet.workers
    holder.outage()
    ends_at, probes = fleet.now + 1800.0, 0

    def hide(message_id: str) -> None:
        holder.control.hidden(Hidden(message_id, "handle", "mail", fleet.now + 7200.0), fleet.now)

    for number in range(3):
        hide(f"m{number}")
    while State.OPEN in fleet.states() and fleet.now < ends_at + 7200.0:
        rng.shuffle(workers)
        fleet.tick()
        for recalled in holder.control.recalls(fleet.now, room=10):
            is_down = fleet.now < ends_at
            probes += holder.run(recalled.message_id, Outcome.RETRYABLE if is_down else None)
            if is_down:
                hide(recalled.message_id)
    assert 25 <= probes <= 50, "about one a minute"
    assert fleet.now <= ends_at + 90.0


SKEWS = [(60.0, 0.0, 0.0, 0.0), (-60.0, 0.0, 0.0, 0.0), (0.0, 0.0, 60.0, -60.0)]


@pytest.mark.parametrize("skews", SKEWS, ids=str)
def test_a_clock_that_is_a_minute_off_does_not_matter(
    fleet: Fleet, skews: tuple[float, ...]
) -> None:
    """Two outages of ten minutes, each found by another worker; probes, and who learns when."""
    for worker, skew in zip(fleet.workers, skews, strict=True):
        worker.skew = skew
    for first in (0, 3):
        fleet.workers[first].outage()
        probes = 0
        for second in range(600):
            fleet.tick()
            if second == 2:
                assert fleet.states() == {State.OPEN}
            for number, worker in enumerate(fleet.workers):
                probes += worker.run(f"{second} {number}", Outcome.RETRYABLE)
        assert 10 <= probes <= 40
        last = fleet.now
        while State.CLOSED not in fleet.states():
            fleet.tick()
            for number, worker in enumerate(fleet.workers):
                worker.run(f"{fleet.now} {number}", None)
        assert fleet.now - last <= 80, "a probe is due each 45 to 75 seconds"
        fleet.tick()
        fleet.tick()
        assert fleet.states() == {State.CLOSED}
        for worker in fleet.workers:
            worker.control.admission.stop()  # the recovery is over
        fleet.tick(60.0)


def test_a_permit_ends_with_the_worker_that_had_it(fleet: Fleet) -> None:
    fleet.workers[0].outage()
    fleet.tick()
    for _ in range(10):
        fleet.tick()
    (holder,) = [w for w in fleet.workers if w.control.health.needs_probe(fleet.now)]
    fleet.workers.remove(holder)
    fleet.tick(PERMIT_SECONDS + 1)
    assert sum(w.control.health.needs_probe(fleet.now) for w in fleet.workers) == 1


def test_without_the_store_each_finds_out_and_probes_by_itself(fleet: Fleet) -> None:
    fleet.store.is_away = True
    fleet.tick()
    fleet.workers[0].outage()
    fleet.tick()
    assert [worker.state for worker in fleet.workers] == [State.OPEN] + 3 * [State.CLOSED]
    fleet.tick(60.0)
    assert fleet.workers[0].run("probe", None)
    assert fleet.workers[0].state is State.CLOSED


def test_a_store_that_is_back_is_told(fleet: Fleet) -> None:
    fleet.store.is_away = True
    fleet.workers[0].outage()
    fleet.tick()
    fleet.store.is_away = False
    fleet.tick()
    fleet.tick()
    assert fleet.states() == {State.OPEN}


def test_a_record_of_an_earlier_outage_opens_nothing(fleet: Fleet) -> None:
    control = Control(Thresholds(), Random(1))
    shared = SharedHealth(control)
    down = Word(True, at=100.0, next_probe_at=105.0)
    shared.look(down, 200.0, 200.0)
    assert control.health.state is State.OPEN
    shared.look(Word(False, at=300.0), 301.0, 301.0)
    assert control.health.state is State.CLOSED
    shared.look(down, 302.0, 302.0)
    assert control.health.state is State.CLOSED


def test_what_could_not_be_written_is_written_next_time() -> None:
    control = Control(Thresholds(), Random(1))
    shared = SharedHealth(control)
    assert shared.look(None, 0.0, 0.0) is None
    for number in range(6):
        control.look(
            str(number),
            1.0,
            policy=FullJitter(),
            looks=1,
            longest=9.0,
            ahead=0,
            longest_wait=2.0,
        )
        control.ended(str(number), Outcome.RETRYABLE, 1.0)
    first = shared.look(None, 2.0, 2.0)
    assert first is not None
    assert shared.look(None, 3.0, 3.0) == first
    shared.written(first)
    assert shared.look(first, 4.0, 4.0) is None


@pytest.mark.parametrize("text", ["", "5", "{}", '{"is_open": 1, "surprise": 2}'], ids=repr)
def test_a_record_that_nobody_can_read_leaves_each_to_itself(fleet: Fleet, text: str) -> None:
    from celery_sqs_backoff.store.protocol import key_of

    fleet.store.add(key_of("health", "mail"), text, 1e6)
    fleet.tick()
    health: Any = fleet.workers[0].control.health
    assert not health.needs_permit


def test_a_store_that_hangs_keeps_no_worker_from_probing(fleet: Fleet) -> None:
    """Its call does not end, so that nobody says that it is away."""
    worker = fleet.workers[0]
    worker.outage()
    fleet.tick()
    fleet.workers[1].run("a", None)
    fleet.now += 60.0  # and no tick
    assert worker.run("probe", None)
    assert worker.state is State.CLOSED


def test_a_machine_without_threads_keeps_no_worker_from_probing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    control, now = Control(Thresholds(), Random(1)), 1000.0
    gate: Any = Mock(control=control)
    facts: Any = {"lock": threading.RLock(), "worker": "a", "wake": lambda gate: None}
    sharing = Sharing(MemoryStore(), clock=lambda: now, **facts)
    monkeypatch.setattr("threading.Thread.start", no_room)
    sharing.add(gate, ("mail",))
    control.told_open(now, now + 5.0)
    assert control.health.needs_probe(now + 60.0)


def test_the_looks_of_a_worker_keep_no_step_with_anything() -> None:
    """Nor with its receives: all that it brought forward to probe with would go to others."""
    pauses: list[float] = []
    facts: Any = {"lock": threading.RLock(), "worker": "a", "wake": lambda gate: None}
    sharing = Sharing(MemoryStore(), clock=lambda: 0.0, rng=Random(1), **facts)

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 200

    sharing._stopped = Mock(wait=wait)
    sharing._run()
    assert 0.5 <= min(pauses) < 0.6
    assert 1.4 < max(pauses) <= 1.5
