"""A fleet at an agreed rate, in virtual time: its pools are full, slow, stuck, or stopped."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from threading import RLock
from typing import Any

import pytest

from celery_sqs_backoff.provider.fleet import Taken
from celery_sqs_backoff.provider.rate import HEADROOM, RETURN_SHARE, Place, Times, assign
from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.worker.pacing import Pace, Paced, Pacer

from .test_provider_pacing import well

#: From a message that is started to its task, and from a call of the store to its answer.
ACCEPT_SECONDS = 0.003
STORE_SECONDS = 0.004


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = count()

    def at(self, time: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._sequence), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until


class Store:
    """Redis: one line of slots for all workers."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate
        self._times, self._seen = Times(), set[int]()
        self.is_away = self.hangs = False
        self.taken: dict[int, int] = {}

    def take(self, worker: int, longest: Sequence[float]) -> Taken:
        if self.is_away:
            raise StoreUnavailable("away")
        self._seen.add(worker)
        now = self._clock.now
        places, self._times = assign(self._times, now, longest, rate=self._rate * HEADROOM)
        taken = self.taken.get(worker, 0) + sum(place.is_slot for place in places)
        self.taken[worker] = taken
        return Taken([Place(each.at - now, each.is_slot) for each in places], len(self._seen))


class Message:
    has_slot = is_over = False
    begun_at: float | None = None


class Worker:
    """A pacer without threads, and a pool whose processes take tasks in their order."""

    def __init__(
        self, world: World, number: int, processes: int, seconds: Callable[[], float]
    ) -> None:
        self.world, self.clock, self.number = world, world.clock, number
        self.seconds, self.free, self.queue = seconds, processes, deque[Any]()
        self.is_stuck = False
        self.stopped_until = -math.inf
        self._next_step, self._is_asking = 0, False
        self.pacer = Pacer(lambda: self.clock.now, RLock(), lambda: None)
        self.pacer._threads = [None, None]  # type: ignore[list-item]  # none is started
        fleet: Any = None
        if world.store is not None:
            fleet = type("Fleet", (), {"take": lambda _, longest: self._take(longest)})()
        self.pace = Pace("mail", world.rate, fleet, well())

    # Its pacer

    def join(self, message: Message) -> None:
        def start(slot: float) -> None:
            message.has_slot = True
            self.queue.append(message)
            self.clock.after(ACCEPT_SECONDS, self.pump)

        paced = Paced(
            start,
            lambda until: self.world.hide(message, until),
            lambda: message.is_over,
            lambda: message.has_slot and not message.is_over,
        )
        self.pacer.join(self.pace, paced, self.world.longest)
        self.wake()

    def wake(self) -> None:
        """Step now, instead of when it meant to: as the thread does that is notified."""
        self._step_at(self.stopped_until)

    def _step_at(self, time: float) -> None:
        self._next_step += 1
        number = self._next_step
        self.clock.at(time, lambda: number == self._next_step and self._step())

    def _step(self) -> None:
        if self.clock.now < self.stopped_until:
            self._step_at(self.stopped_until)
            return
        self.world.steps += 1
        actions = self.pacer.step(self.clock.now)
        for action in actions:
            action()
        self._ask_soon()
        pause = 0.0 if actions else self.pacer._pause()
        if pause is not None:
            self._step_at(self.clock.now + pause)

    def _ask_soon(self) -> None:
        if self.pacer._to_ask and not self._is_asking:
            self._is_asking = True
            self.clock.after(STORE_SECONDS, self._ask)

    def _ask(self) -> None:
        if self.world.store is not None and self.world.store.hangs:
            self.clock.after(0.1, self._ask)
            return
        self._is_asking = False
        for pace in list(self.pacer._to_ask):
            del self.pacer._to_ask[pace]
            asked = pace.lacking(self.clock.now) if pace.away_until is None else []
            if asked or (pace.away_until is not None and self.clock.now >= pace.away_until):
                self.pacer.ask(pace, asked)
        self.wake()

    def _take(self, longest: Sequence[float]) -> Taken:
        assert self.world.store is not None
        return self.world.store.take(self.number, longest)

    # Its pool

    def pump(self) -> None:
        while self.queue and self.free > 0 and not self.is_stuck:
            if self.clock.now < self.stopped_until:
                self.clock.at(self.stopped_until, self.pump)
                return
            task = self.queue.popleft()
            if isinstance(task, float):
                seconds = task
            elif task.is_over:
                continue
            else:
                task.has_slot, task.begun_at = False, self.clock.now
                self.world.begun.append(self.clock.now)
                seconds = self.seconds()
                if self.clock.now < self.world.hangs_until:
                    seconds = self.world.hangs_until - self.clock.now
            self.free -= 1
            self.clock.after(seconds, self._end)

    def _end(self) -> None:
        self.free += 1
        self.pump()


class World:
    """A queue that brings only this provider's messages, or others' as well (it hides some)."""

    def __init__(
        self,
        *,
        rate: float,
        workers: int = 1,
        processes: int = 20,
        seconds: float = 0.05,
        is_shared: bool = True,
        is_alone: bool = True,
        messages: int | None = None,
        seed: int = 0,
    ) -> None:
        self.clock, self.rate, self.rng = Clock(), rate, random.Random(seed)
        self.store = Store(self.clock, rate) if is_shared else None
        self.longest = 60.0 if is_alone else 2.0
        self.hangs_until = -math.inf
        self.begun: list[float] = []
        self.messages: list[Message] = []
        self._left = math.inf if messages is None else messages
        self.steps = 0
        spread = lambda: seconds * self.rng.uniform(0.5, 1.5)  # noqa: E731
        self.workers = [Worker(self, number, processes, spread) for number in range(workers)]
        self._returned = deque[Message]()

    def hide(self, message: Message, until: float) -> None:
        self.clock.at(until, lambda: self._returned.append(message))

    def receive(self, most: int) -> None:
        """Each worker has up to so many messages, as its prefetch window lets it."""
        ready = [each for each in self.workers if self.clock.now >= each.stopped_until]
        while ready := [each for each in ready if len(each.pace.line) + len(each.queue) < most]:
            if self._returned:
                message = self._returned.popleft()
            elif len(self.messages) < self._left:
                message = Message()
                self.messages.append(message)
            else:
                break
            self.rng.choice(ready).join(message)
        self.clock.after(0.05, lambda: self.receive(most))

    def busiest(self, after: float = 0.0, before: float = math.inf) -> int:
        """Most calls in any second that ends between the two."""
        at, first, most = [each for each in self.begun if each < before], 0, 0
        for last, now in enumerate(at):
            while at[first] <= now - 1:
                first += 1
            if now >= after:
                most = max(most, last - first + 1)
        return most

    def used(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.begun) / (until - since) / self.rate


@pytest.mark.parametrize(
    ("rate", "workers", "is_shared"),
    [
        (0.2, 1, True),
        (0.2, 5, False),
        (5.0, 2, True),
        (50.0, 1, True),
        (50.0, 3, True),
        (50.0, 2, False),
        (200.0, 5, True),
    ],
)
def test_the_rate_holds_and_is_used(rate: float, workers: int, is_shared: bool) -> None:
    seconds = max(10.0, 20 / rate)
    own = 1 if is_shared else workers
    world = World(rate=rate, workers=workers, is_shared=is_shared)
    world.receive(max(4, int(rate)))
    world.clock.run(seconds)
    assert world.busiest() <= math.ceil(rate * 1.04) * own
    assert world.used(seconds / 10, seconds) >= 0.9 * own
    assert world.steps < 10 * seconds * (rate + 1) * workers


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("ahead", "seconds", "rate"),
    [(4, 0.1, 50.0), (4, 5.0, 0.2), (50, 0.1, 5.0), (50, 5.0, 50.0), (50, 1.0, 0.2)],
)
def test_messages_begin_behind_others_backlog(
    ahead: int, seconds: float, rate: float, workers: int
) -> None:
    """Others' tasks are always ahead in the pool: each message waits for those, and not longer."""
    world = World(rate=rate, workers=workers, processes=4, messages=4 * workers)
    wait = (ahead + 8) * seconds / 4

    def fill(worker: Worker) -> None:
        while sum(isinstance(task, float) for task in worker.queue) < ahead:
            worker.queue.append(seconds)
        worker.pump()
        world.clock.after(seconds / 4, lambda: fill(worker))

    for worker in world.workers:
        fill(worker)
    world.receive(ahead + 12)
    world.clock.run(10.0 + 4 * workers * (wait + 1 / rate))
    assert all(message.begun_at is not None for message in world.messages), "none waits for ever"
    most = sum(worker.pace.most for worker in world.workers)
    assert world.busiest() <= math.ceil(rate) + most


@pytest.mark.parametrize(
    ("rate", "workers", "is_shared"),
    [(0.2, 4, True), (5.0, 1, False), (50.0, 1, True), (50.0, 4, True), (20.0, 4, False)],
)
def test_after_calls_that_hung_a_second_has_the_rate_and_one_seconds_slots(
    rate: float, workers: int, is_shared: bool
) -> None:
    own = 1 if is_shared else workers
    seconds = max(10.0, 10 / rate)
    world = World(rate=rate, workers=workers, is_shared=is_shared)
    world.receive(max(4, int(3 * rate)))
    world.clock.run(seconds)
    world.hangs_until = seconds + 60.0
    world.clock.run(seconds + 63.0 + seconds)
    most = sum(worker.pace.most for worker in world.workers)
    assert world.busiest(after=seconds) <= math.ceil(rate * 1.04) * own + most
    assert world.busiest(after=seconds + 63.0) <= math.ceil(rate * 1.04) * own + 1
    assert world.used(seconds + 63.0, 2 * seconds + 63.0) >= 0.85 * own


@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_a_worker_that_was_stopped_makes_up_for_nothing(rate: float) -> None:
    """SIGSTOP, or a machine that was suspended: of three workers."""
    world = World(rate=rate, workers=3)
    world.receive(max(4, int(rate)))
    world.clock.run(10.0)
    world.workers[0].stopped_until = 20.0
    world.clock.run(40.0)
    most = world.workers[0].pace.most
    assert world.busiest() <= math.ceil(rate * 1.04) + most
    assert world.busiest(after=23.0) <= math.ceil(rate * 1.04)
    assert world.used(23.0, 40.0) >= 0.9


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "mixed"])
@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_a_worker_whose_pool_takes_nothing_costs_the_others_few_slots(
    rate: float, is_alone: bool
) -> None:
    world = World(rate=rate, workers=3, is_alone=is_alone)
    stuck = world.workers[0]
    stuck.is_stuck = True
    window = max(4, int(rate))
    world.receive(window)
    world.clock.run(20.0 + 60 / rate)
    assert world.store is not None
    assert world.store.taken[0] <= window + 2 * stuck.pace.most
    assert world.used(10.0, 20.0 + 60 / rate) >= 0.9


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "mixed"])
@pytest.mark.parametrize("processes", [1.05, 1.33])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_fleet_with_hardly_more_processes_than_the_rate_needs(
    workers: int, processes: float, is_alone: bool
) -> None:
    each = 6
    seconds = workers * each / processes / 40.0
    world = World(rate=40.0, workers=workers, processes=each, seconds=seconds, is_alone=is_alone)
    world.receive(40)
    world.clock.run(40.0)
    assert world.used(10.0, 40.0) >= 0.9
    assert world.busiest() <= 42 + sum(worker.pace.most for worker in world.workers)


def test_a_slow_worker_leaves_its_slots_to_a_fast_one() -> None:
    world = World(rate=50.0, workers=2, seconds=0.5, processes=2)
    fast = world.workers[1]
    fast.free, fast.seconds = 40, lambda: 0.1
    world.receive(40)
    world.clock.run(30.0)
    assert world.used(10.0, 30.0) >= 0.85


def test_messages_that_are_settled_in_line_use_no_slots() -> None:
    world = World(rate=20.0, workers=2)
    world.receive(60)

    def settle() -> None:
        waiting = [each for each in world.messages if each.begun_at is None and not each.has_slot]
        for message in world.rng.sample(waiting[:100], min(10, len(waiting))):
            message.is_over = True
        world.clock.after(1.0, settle)

    settle()
    world.clock.run(20.0)
    assert world.busiest() <= 21
    assert world.used(3.0, 20.0) >= 0.9


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [20.0, 50.0])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("how", ["is_away", "hangs"])
def test_a_store_that_goes_away_and_comes_back(
    how: str, workers: int, rate: float, seed: int
) -> None:
    """No second is fuller than agreed, although the workers notice each at another time."""
    world = World(rate=rate, workers=workers, seed=seed, is_alone=False)
    world.receive(60)
    assert world.store is not None
    world.clock.run(10.0 + 0.37 * seed)
    setattr(world.store, how, True)
    world.clock.run(25.0 + 0.81 * seed)
    setattr(world.store, how, False)
    world.clock.run(50.0)
    assert world.busiest() <= rate * 1.05 + 1
    assert world.used(5.0, 50.0) >= 0.85
    assert world.used(41.0, 50.0) >= 0.9


def test_hidden_messages_return_as_often_as_slots_come() -> None:
    world = World(rate=10.0, is_alone=False, messages=200)
    world.receive(200)
    world.clock.run(1.1 * 200 / 10.0 / HEADROOM / RETURN_SHARE + 3.0)
    assert all(message.begun_at is not None for message in world.messages)
