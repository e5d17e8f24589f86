"""One rate for all workers, with a store that they share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from celery_sqs_backoff import Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note
from tests.support.redis_database import redis_url

from .stage import Stage, app_of_this_module

app = app_of_this_module()

#: What the provider takes, how long there is a backlog, and how many workers work it off.
RATE = 50
SECONDS = 10
WORKERS = 3

STORE = redis_url()


@app.task(base=SQSBackoffTask, name="rate.call", provider=Provider("mail", rate=RATE))
def call(number: int) -> None:
    note(task="rate.call", number=number, at=time.time())


@app.task(base=SQSBackoffTask, name="rate.seldom", provider=Provider("seldom", rate=5))
def seldom(number: int) -> None:
    note(task="rate.seldom", number=number)


@app.task(base=SQSBackoffTask, name="rate.other")
def other() -> None:
    note(task="rate.other")
    time.sleep(0.25)


class Stalls:
    """How long this machine lets a process wait that only sleeps: what no worker can help."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(0.01):
            now = time.monotonic()
            self.longest = max(self.longest, now - before - 0.01)
            before = now


def send(stage: Stage, messages: int) -> None:
    for number in range(messages):
        stage.send("rate.call", number)


@pytest.mark.redis
def test_three_workers_make_as_many_calls_as_agreed_and_hardly_fewer(
    make_stage: Callable[..., Stage],
) -> None:
    """50/s: no second above 52, wherever it begins; at least 90 % used while there is a backlog.

    A busy machine starts calls late: as late as it lets this process wait is forgiven.
    """
    settings = {"store": STORE, "namespace": uuid4().hex, "secret": "x"}
    stage = make_stage(conf={"sqs_backoff": settings})
    messages = RATE * SECONDS
    send(stage, messages)
    with contextlib.ExitStack() as stack, Stalls() as stalls:
        for _ in range(WORKERS):
            stack.enter_context(stage.worker(concurrency=2))
        eventually(lambda: len(stage.runs("rate.call")) == messages, timeout=20 * SECONDS)
    at = sorted(run["at"] for run in stage.runs("rate.call"))
    assert sorted(run["number"] for run in stage.runs("rate.call")) == list(range(messages))
    busiest, first = 0, 0
    for last, now in enumerate(at):
        while at[first] <= now - 1:
            first += 1
        busiest = max(busiest, last - first + 1)
    # From when all work to when messages become few.
    at = at[messages // 5 : -RATE]
    used = (len(at) - 1) / (at[-1] - at[0]) / RATE
    gap = max(later - earlier for earlier, later in pairwise(at))
    figures: dict[str, Any] = {"busiest": busiest, "used": round(used, 3), "gap": round(gap, 3)}
    figures["stall"] = round(stalls.longest, 3)
    print(figures)  # noqa: T201
    assert busiest <= RATE + 2 + 2 * RATE * max(0.0, stalls.longest - 0.02), figures
    assert used >= (0.9 if stalls.longest < 0.05 else 0.75), figures


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_calls_at_a_rate_are_made_although_other_tasks_fill_the_pool(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    """Each waits behind others' tasks for longer than slots are apart, and keeps its slot."""
    stage = make_stage()
    for number in range(8):
        stage.send("rate.seldom", number)
    for _ in range(60):
        stage.send("rate.other")
    with stage.worker(pool=pool, concurrency=1, stop_timeout=1):
        eventually(lambda: len(stage.runs("rate.seldom")) == 8, timeout=40)
        others = len(stage.runs("rate.other"))
    assert others < 50, "they would wait for as long as other messages come"
    assert sorted(run["number"] for run in stage.runs("rate.seldom")) == list(range(8))
