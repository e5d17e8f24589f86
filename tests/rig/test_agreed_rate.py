"""Workers share a provider's agreed rate, in virtual time. They use it and do not exceed it."""

from __future__ import annotations

import math
from bisect import bisect_left
from random import Random
from typing import Any

from celery_sqs_backoff import Provider
from celery_sqs_backoff.store.memory import MemoryStore

from .bodies import returns
from .timeline import BEGIN

RATE = 20


class Store:
    """A store that all workers share, and that can be away."""

    is_away = False

    def __init__(self) -> None:
        self._records = MemoryStore()

    def _call(self, method: str, *args: Any) -> Any:
        if self.is_away:
            raise TimeoutError
        return getattr(self._records, method)(*args)

    def add(self, *args: Any) -> Any:
        return self._call("add", *args)

    def get(self, *args: Any) -> Any:
        return self._call("get", *args)

    def replace(self, *args: Any) -> Any:
        return self._call("replace", *args)

    def delete(self, *args: Any) -> Any:
        return self._call("delete", *args)


class Fleet:
    """Workers whose tasks begin a little late and take a while. ``began`` has the times."""

    def __init__(
        self, rig: Any, *, workers: int = 3, messages: int, rate: int = RATE, **options: Any
    ) -> None:
        self.rig, self.rate, self.store = rig, rate, Store()
        self.began: list[float] = []
        #: The provider does not answer until this time.
        self.hangs_until = 0.0
        #: Workers whose pools begin no task.
        self.stuck: list[Any] = []
        rig.app.conf.sqs_backoff = {"store": self.store, "secret": "x", "namespace": "fleet"}
        rig.task(returns, provider=Provider("mail", rate=rate), **options)
        rig.on_run = self._take
        rig.queue(max_receive_count=1000)
        self.messages = [rig.send() for _ in range(messages)]
        self.workers = [self._start() for _ in range(workers)]

    def _start(self) -> Any:
        """Start a worker whose loop is a little late.

        Otherwise one worker would receive all messages.
        """
        worker = self.rig.start_worker(processes=8)
        wake_at = worker.wake_at

        def wake_late(at: float) -> None:
            if at < math.inf:
                tick = math.ceil(at * 100)
                at = tick / 100 + Random(f"{tick} {worker.name}").uniform(0.0, 0.01)
            wake_at(at)

        worker.wake_at = wake_late
        return worker

    def _take(self, run: Any) -> None:
        if run.worker not in self.stuck:
            run.worker.after(self.rig.rng.uniform(0.0, 0.03), lambda: self._begin(run))

    def _begin(self, run: Any) -> None:
        if run in run.worker.runs and not run.has_begun:
            run.begin()
            now = self.rig.timeline.now
            self.began.append(now)
            seconds = max(self.hangs_until - now, 0.1 * self.rig.rng.uniform(0.5, 1.5))
            run.worker.after(seconds, lambda: run in run.worker.runs and run.finish())

    def pass_time(self, seconds: float) -> tuple[float, int]:
        """Let time pass. Return the used share of the rate, and the calls in the busiest second."""
        since = self.rig.timeline.now
        self.rig.pass_time(seconds)
        at = [each for each in self.began if each >= since]
        busiest = max(bisect_left(at, each + 1) - n for n, each in enumerate(at))
        return len(at) / seconds / self.rate, busiest


def test_one_killed_and_store_away(rig: Any) -> None:
    """Three workers use at least 90 % of the rate, and exceed it by at most 5 % in any second.

    This holds although one worker is killed after 10 s, and the store is away for 20 s.
    """
    fleet = Fleet(rig, messages=2_200)
    rig.timeline.at(BEGIN + 10, fleet.workers[0].kill)
    rig.timeline.at(BEGIN + 50, lambda: setattr(fleet.store, "is_away", True))
    rig.timeline.at(BEGIN + 70, lambda: setattr(fleet.store, "is_away", False))
    used, busiest = fleet.pass_time(110)
    assert used >= 0.9
    assert busiest <= RATE * 1.05
    assert max(message.receives for message in fleet.messages) <= 4, "received too often"


def test_backlog_longer_than_holds(rig: Any) -> None:
    """A worker uses the rate even if a message's turn comes after the end of its ``retry_for``."""
    fleet = Fleet(rig, workers=1, messages=500, rate=2, retry_for=80)
    assert fleet.pass_time(220)[0] >= 0.85


def test_store_away_at_start(rig: Any) -> None:
    """If the store is away at the start, each worker takes a tenth of the rate.

    Without the store, a worker cannot know how many workers there are.
    """
    fleet = Fleet(rig, messages=400)
    fleet.store.is_away = True
    used, busiest = fleet.pass_time(20)
    assert 0.2 <= used <= 0.31
    assert busiest <= RATE / 2
    fleet.store.is_away = False
    assert fleet.pass_time(30)[1] <= RATE * 1.05


def test_provider_hangs(rig: Any) -> None:
    """When a provider answers again, workers make at most twice the agreed calls in a second.

    Before, all processes hung, and their waiting calls begin together.
    """
    fleet = Fleet(rig, messages=800)
    fleet.pass_time(10)
    fleet.hangs_until = rig.timeline.now + 30
    assert fleet.pass_time(33)[1] <= 2 * RATE
    used, busiest = fleet.pass_time(10)
    assert used >= 0.9
    assert busiest <= RATE * 1.05


def test_suspended(rig: Any) -> None:
    """A worker whose machine was suspended does not make up for the calls that it missed."""
    fleet = Fleet(rig, messages=800)
    fleet.pass_time(10)
    fleet.workers[0].suspend(10)
    assert fleet.pass_time(15)[1] <= RATE * 1.05 + RATE / 3
    used, busiest = fleet.pass_time(10)
    assert used >= 0.9
    assert busiest <= RATE * 1.05


def test_stuck(rig: Any) -> None:
    """A worker whose tasks do not begin leaves its share of the rate to the other workers."""
    fleet = Fleet(rig, messages=800)
    fleet.stuck = fleet.workers[:1]
    fleet.pass_time(10)
    assert fleet.pass_time(20)[0] >= 0.9


def test_without_a_store(rig: Any) -> None:
    """Without a shared store, each worker has the rate for itself."""
    rig.task(returns, provider=Provider("mail", rate="6/m"))
    messages = [rig.send() for _ in range(3)]
    worker = rig.start_worker(processes=4)
    rig.pass_time(1)
    assert len(worker.runs) == 1
    assert [message.fate for message in messages].count("hidden") == 2
    worker.runs[0].finish()
    for runs in (1, 1):
        rig.pass_time(11)
        assert len(worker.runs) == runs
        worker.runs[0].finish()
    assert max(message.receives for message in messages) == 2
