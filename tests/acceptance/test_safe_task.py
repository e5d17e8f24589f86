"""Guard, lock and crash counter in real workers: what the message's road makes of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_sqs_backoff import Guard, NonRetryable, Retryable, Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note
from tests.support.redis_database import redis_url

from .stage import REDIS, Stage, app_of_this_module

app = app_of_this_module()

STORE = redis_url()
CONF = {"result_backend": REDIS, "sqs_backoff": {"store": STORE}}

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    database = redis.Redis.from_url(STORE)
    database.flushdb()
    yield
    database.flushdb()


app.conf.setdefault("sqs_backoff", {"store": STORE})
#: Not shared: on the app of another test, which names no store, a guard is refused.
OPTIONS = {"base": SQSBackoffTask, "bind": True, "shared": False, "backoff": Schedule([1])}


@app.task(name="safe.mail", guard=Guard(key="mail:{customer}", window=3600), **OPTIONS)
def mail(self: Any, customer: int, how: str) -> str:
    note(task="safe.mail", how=how, retries=self.request.retries)
    if how == "down" and self.request.retries == 0:
        raise Retryable("the provider is down")
    if how == "refused":
        raise NonRetryable("no such address", safe_to_undo=True)
    if how == "timeout":
        raise TimeoutError
    return "sent"


@app.task(name="safe.exclusive", max_retries=0, **OPTIONS)
def exclusive(self: Any, key: str, seconds: float) -> str:
    with self.exclusive(key):
        note(task="safe.exclusive", what="start")
        time.sleep(seconds)
        note(task="safe.exclusive", what="end")
    return "done"


@app.task(name="safe.crash", crash_budget=2, **OPTIONS)
def crash(self: Any) -> None:
    note(task="safe.crash", pid=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="safe.take_back", **OPTIONS)
def take_back(self: Any, done: str) -> None:
    note(task="safe.take_back", done=done)


@app.task(name="safe.order", crash_budget=1, **OPTIONS)
def order(self: Any) -> None:
    with self.workflow("order:7") as order:
        order.step("account", str, 7, undo=take_back.s())
        os.kill(os.getpid(), signal.SIGKILL)


def test_another_message_in_the_window_ends_quietly_and_says_so(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(conf=CONF)
    with stage.worker(concurrency=1):
        first = stage.send("safe.mail", 7, "down")
        assert first.get(timeout=20) == "sent"  # let through again after its own retry
        second = stage.send("safe.mail", 7, "up")
        assert "another message" in second.get(timeout=20)["refused"]
        assert stage.send("safe.mail", 8, "up").get(timeout=20) == "sent"
        stage.wait_until_settled()
    assert stage.dead_letters() == []
    assert [run["how"] for run in stage.runs("safe.mail")] == ["down", "down", "up"]


@pytest.mark.parametrize(("how", "passes"), [("refused", True), ("timeout", False)])
def test_a_guard_is_unset_only_if_nothing_was_processed(
    make_stage: Callable[..., Stage], how: str, passes: bool
) -> None:
    stage = make_stage(conf=CONF)
    with stage.worker(concurrency=1):
        first = stage.send("safe.mail", 7, how)
        with pytest.raises((NonRetryable, TimeoutError)):
            first.get(timeout=20)
        answer = stage.send("safe.mail", 7, "up").get(timeout=20)
        assert (answer == "sent") is passes


def test_a_busy_lock_is_no_retry_and_no_failure(make_stage: Callable[..., Stage]) -> None:
    """max_retries=0, and still both run, one after the other."""
    stage = make_stage(conf=CONF)
    with stage.worker(concurrency=2):
        results = [stage.send("safe.exclusive", "account:7", 2) for _ in range(2)]
        assert [result.get(timeout=30) for result in results] == ["done", "done"]
        stage.wait_until_settled()
    assert stage.dead_letters() == []
    assert [run["what"] for run in stage.runs("safe.exclusive")] == ["start", "end"] * 2


def test_crashes_are_counted_across_workers(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(conf=CONF)
    result = stage.send("safe.crash")
    with stage.worker(concurrency=1):
        eventually(lambda: result.state == "RETRY", timeout=20)
    with stage.worker(concurrency=1):
        eventually(lambda: result.state == "FAILURE", timeout=20)
        stage.wait_until_settled()
    assert len(stage.runs("safe.crash")) == 2
    [letter] = stage.dead_letters()
    assert letter.record is not None
    assert letter.record["reason"] == "worker lost"


def test_the_workflow_of_a_lost_process_is_taken_back(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(conf=CONF | {"sqs_backoff": {"store": STORE, "secret": "one"}})
    with stage.worker(concurrency=1):
        stage.send("safe.order")
        eventually(lambda: stage.runs("safe.take_back"), timeout=30)
        stage.wait_until_settled()
    assert [run["done"] for run in stage.runs("safe.take_back")] == ["7"]
    assert [letter.record["reason"] for letter in stage.dead_letters() if letter.record] == [
        "worker lost"
    ]
