"""A process that is free gets work, whatever else the worker holds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

LONG_SECONDS = 30


@app.task(base=SQSBackoffTask, name="free.runs")
def runs(name: str, seconds: float = 0) -> None:
    note(task="free.runs", name=name)
    time.sleep(seconds)


@app.task(base=SQSBackoffTask, name="free.limited", rate_limit="1/m")
def limited(name: str) -> None:
    note(task="free.limited", name=name)


def have_run(stage: Stage, *names: str) -> bool:
    return set(names) <= {entry["name"] for entry in stage.record.entries()}


def test_a_pool_that_may_grow_does(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 30}})
    options = ("--prefetch-multiplier", "1", "--autoscale", "4,1")
    with stage.worker(concurrency=4, options=options, stop_timeout=1):
        stage.send("free.runs", "long 1", LONG_SECONDS)
        stage.send("free.runs", "long 2", LONG_SECONDS)
        eventually(lambda: have_run(stage, "long 1", "long 2"), timeout=20)
        stage.send("free.runs", "short")
        eventually(lambda: have_run(stage, "short"), timeout=10)


def test_messages_that_wait_for_their_group_leave_a_process_to_other_groups(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(queues={"test": {"fifo": True}})
    for n in range(3):
        stage.send("free.runs", f"a{n}", LONG_SECONDS, MessageGroupId="a")
    options = ("--prefetch-multiplier", "1")
    with stage.worker(concurrency=2, options=options, stop_timeout=1):
        eventually(lambda: have_run(stage, "a0"), timeout=20)
        stage.send("free.runs", "b", 0, MessageGroupId="b")
        eventually(lambda: have_run(stage, "b"), timeout=10)
        assert not have_run(stage, "a1")


@pytest.mark.parametrize("pool", ["solo", "prefork", "gevent"])
def test_a_task_that_is_held_for_its_time_leaves_its_process_to_others(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 60}})
    options = ("--prefetch-multiplier", "1")
    with stage.worker(pool=pool, concurrency=1, options=options, stop_timeout=1):
        stage.send("free.runs", "later", 0, countdown=25)
        eventually(lambda: stage.proxy.counts()["ReceiveMessage"].messages >= 1)  # type: ignore[union-attr]
        stage.send("free.runs", "now")
        eventually(lambda: have_run(stage, "now"), timeout=10)
        assert not have_run(stage, "later")


def test_a_rate_limit_holds_up_its_own_task_only(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 60}})
    for n in range(6):
        stage.send("free.limited", f"limited {n}")
    with stage.worker(concurrency=1, stop_timeout=1):
        eventually(lambda: have_run(stage, "limited 0") or have_run(stage, "limited 1"))
        stage.send("free.runs", "now")
        eventually(lambda: have_run(stage, "now"), timeout=10)
        assert len(stage.record.entries(task="free.limited")) == 1
