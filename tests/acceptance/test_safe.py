"""Guards, locks, workflows and crash budgets in real workers that share a store."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import uuid4

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import (
    Guard,
    NonRetryable,
    Retryable,
    Schedule,
    SQSBackoffTask,
    WorkflowTask,
)
from tests.support.processes import eventually
from tests.support.record import note
from tests.support.redis_database import redis_url
from tests.support.redis_server import redis_server

from .stage import REDIS, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()
# Without a store, the definition of a task with a guard raises an error.
app.conf.setdefault("sqs_backoff", {"store": redis_url()})


def task(name: str, **options: Any) -> Any:
    defaults = {"base": SQSBackoffTask, "backoff": Schedule([1])}
    return app.task(name=name, bind=True, **defaults | options)


@task("mail", guard=Guard(key="mail:{customer}", window=3600))
def mail(self: Any, customer: str, how: str) -> str:
    note(task="mail", customer=customer, how=how)
    if how == "down" and self.request.retries == 0:
        raise Retryable("the provider is down")
    if how == "refused":
        raise NonRetryable("no such address", not_processed=True)
    if how == "timeout":
        raise TimeoutError
    return "sent"


@task("exclusive", backoff=Schedule([1]))
def exclusive(self: Any, key: str, seconds: float) -> str:
    with self.exclusive(key):
        note(task="exclusive", what="start")
        time.sleep(seconds)
        note(task="exclusive", what="end")
    return "done"


@task("crash", crash_budget=2, backoff=Schedule([5]))
def crash(self: Any) -> None:
    note(task="crash", worker=os.getppid())
    os.kill(os.getpid(), signal.SIGKILL)


@task("take_back")
def take_back(self: Any, done: str) -> None:
    note(task="take_back", done=done)


@task("order", base=WorkflowTask, crash_budget=1)
def order(self: Any) -> None:
    with self.workflow("order:7", lease=3) as order:
        order.step("account", str, 7, undo=take_back.s())
        os.kill(os.getpid(), signal.SIGKILL)


@task("plain")
def plain(self: Any) -> None:
    note(task="plain")


class Scene:
    """Run the tasks on one worker, and a task that kills its process on two others.

    The first of the two is killed after the task's first crash. The second runs the task again.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

        def send_mail(customer: str, how: str) -> Any:
            return stage.send("mail", customer, how)

        with stage.worker(concurrency=3, queues=[stage["main"].name]):
            firsts = {
                "window": send_mail("window", "down"),
                "refused": send_mail("refused", "refused"),
                "timeout": send_mail("timeout", "timeout"),
            }
            locked = [stage.send("exclusive", "account:7", 2) for _ in range(2)]
            stage.send("order")
            for first in firsts.values():
                first.get(timeout=60, propagate=False)
            self.first = firsts["window"].result
            self.second = {
                customer: send_mail(customer, "up").get(timeout=60)
                for customer in (*firsts, "another")
            }
            self.locked = [result.get(timeout=60) for result in locked]
            eventually(lambda: stage.runs("take_back"), timeout=60)
            stage.wait_until_settled("main")
        self.crashed = stage.send("crash", queue="crash")
        with stage.worker(concurrency=1, queues=[stage["crash"].name]) as worker:
            eventually(lambda: self.crashed.state == "RETRY", timeout=60)
            worker.kill()
        with stage.worker(concurrency=1, queues=[stage["crash"].name]):
            stage.wait_until_settled("crash")


@pytest.fixture(scope="module")
def scene(make_scene):
    own = {"store": redis_url(), "namespace": uuid4().hex, "secret": "one"}
    conf = {"result_backend": REDIS, "sqs_backoff": own}
    queues = {"main": {}, "crash": {"visibility_timeout_seconds": 5}}
    return Scene(make_scene(queues=queues, conf=conf))


@pytest.mark.story("B6")
def test_guard(scene):
    """A guard lets a message run again after its own retry.

    It skips another message with the same key in the window, and the result says why.
    """
    assert scene.first == "sent"
    assert "another message" in scene.second["window"]["refused"]
    assert scene.second["another"] == "sent"
    hows = [run["how"] for run in scene.stage.runs("mail") if run["customer"] == "window"]
    assert hows == ["down", "down"]


@pytest.mark.parametrize(("how", "passes"), [("refused", True), ("timeout", False)])
@pytest.mark.story("B1", "B3")
def test_unset(scene, how, passes):
    """After a failure, the guard lets another message run only if the first has done no work."""
    assert (scene.second[how] == "sent") is passes


@pytest.mark.story("W3")
def test_lock(scene):
    """Two tasks that need the same lock run one after the other, and both succeed."""
    assert scene.locked == ["done", "done"]
    assert [run["what"] for run in scene.stage.runs("exclusive")] == ["start", "end"] * 2


@pytest.mark.story("W2")
def test_workflow(scene):
    """When a workflow's task has crashed too often, its finished steps are undone."""
    assert [run["done"] for run in scene.stage.runs("take_back")] == ["7"]
    letters = [letter.record or {} for letter in scene.stage.dead_letters("main")]
    assert [r["reason"] for r in letters if r["task"] == "order"] == ["worker lost"]


def test_crashes(scene):
    """Each worker counts the crashes that it has seen. If a worker is killed, its count is lost."""
    workers = [run["worker"] for run in scene.stage.runs("crash")]
    assert [workers.count(worker) for worker in dict.fromkeys(workers)] == [1, 2]
    assert scene.crashed.state == "FAILURE"
    [letter] = scene.stage.dead_letters("crash")
    assert letter.record is not None
    assert letter.record["reason"] == "worker lost"


def test_store_away(make_stage, tmp_path, monkeypatch):
    """A worker starts and goes on while its store is away. Only tasks that need the store wait.

    ``sqs-health`` finds the worker healthy, because a restart would not help. ``sqs-status`` says
    that it cannot read the store.
    """
    address = tmp_path / "redis" / "redis.sock"
    own = {"store": f"unix://{address}", "namespace": "shop", "secret": "s" * 32}
    heartbeat, log_file = tmp_path / "heartbeat", tmp_path / "log"
    conf = {"sqs_backoff": own | {"heartbeat": str(heartbeat)}}
    stage = make_stage(conf=conf)

    def says(*arguments):
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: stage.app)
        return str(CliRunner().invoke(celery, ["-A", "shop", *arguments]).output)

    def send_both(number):
        stage.send("plain")
        stage.send("mail", f"customer {number}", "up")
        eventually(lambda: len(stage.runs("plain")) == number, timeout=30)
        eventually(lambda: stage.messages() == (0, 1), timeout=30)
        assert len(stage.runs("mail")) == number - 1
        assert says("sqs-health", "--file", str(heartbeat)) == "healthy\n"
        assert "the store could not be read" in says("sqs-status")

    with stage.worker(concurrency=1, log_file=log_file):
        send_both(1)
        with redis_server(address.parent):
            stage.wait_until_settled()
        send_both(2)
        with redis_server(address.parent):
            stage.wait_until_settled()
            assert "the store could not be read" not in says("sqs-status")
    assert len(stage.runs("mail")) == 2
    assert stage.dead_letters() == []
    assert "sqs_backoff.store_away" in log_file.read_text()
