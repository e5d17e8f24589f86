"""The receipt gate: a message whose time was over before it came is not run again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import REDIS, Stage, app_of_this_module

app = app_of_this_module()


def run(task: Any) -> None:
    note(task=task.name)


options = {"base": SQSBackoffTask, "bind": True}
app.task(name="gate.max_retries", max_retries=2, **options)(run)
app.task(name="gate.retry_for", retry_for=1, **options)(run)
app.task(name="gate.no_limits", retry_for=None, **options)(run)
app.task(name="gate.never", max_retries=0, **options)(run)


@app.task(name="gate.slow", retry_for=1, **options)
def slow(self: Any) -> None:
    note(task="gate.slow")
    time.sleep(1.5)


def receive(stage: Stage, times: int) -> None:
    """Use up receives, as workers do that are killed before they know what became of the task."""
    for _ in range(times):
        [message] = stage.sqs.receive_message(
            QueueUrl=stage.queues[0].url, VisibilityTimeout=0, WaitTimeSeconds=5
        )["Messages"]
        assert message["Body"]


@pytest.mark.parametrize("task", ["gate.max_retries", "gate.never", "gate.no_limits"])
def test_a_message_that_was_received_often_but_never_started_is_run(
    make_stage: Callable[..., Stage], task: str
) -> None:
    """A receive is not a run: workers may have given the message back unstarted."""
    stage = make_stage(conf={"result_backend": REDIS})
    result = stage.send(task)
    receive(stage, 4)
    with stage.worker(pool="solo", concurrency=1):
        stage.wait_until_settled()
        result.get(timeout=5)
    assert stage.dead_letters() == []
    assert len(stage.runs(task)) == 1


def test_a_message_is_not_started_again_when_its_time_is_over(
    make_stage: Callable[..., Stage],
) -> None:
    """``retry_for`` is a second, counted from the first receive; the worker is up after that.

    Three receives: as many runs may have been lost as ``crash_budget`` allows.
    """
    stage = make_stage()
    stage.send("gate.retry_for")
    receive(stage, 3)
    time.sleep(1)
    with stage.worker(pool="solo", concurrency=1):
        stage.wait_until_settled()
    [letter] = stage.dead_letters()
    assert letter.record is not None
    assert letter.record["reason"] == "retry_for is over"
    assert stage.runs("gate.retry_for") == []


def test_a_message_that_a_worker_gave_back_unstarted_runs_when_its_time_is_over(
    make_stage: Callable[..., Stage],
) -> None:
    """Taken in advance, given back at a deploy; the next worker comes after ``retry_for``."""
    stage = make_stage(conf={"worker_prefetch_multiplier": 4})
    for _ in range(3):
        stage.send("gate.slow")
    with stage.worker(concurrency=1) as worker:
        eventually(lambda: stage.runs("gate.slow"), timeout=20, message="nothing has begun")
        worker.stop()
    assert stage.messages() == (2, 0)
    with stage.worker(concurrency=1):
        stage.wait_until_settled()
    assert stage.dead_letters() == []
    assert len(stage.runs("gate.slow")) == 3


@pytest.mark.hazard("H26")
def test_an_expired_message_expires_whatever_its_budget(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(conf={"result_backend": REDIS})
    result = stage.send("gate.max_retries", expires=0.1)
    receive(stage, 5)
    with stage.worker(pool="solo", concurrency=1):
        stage.wait_until_settled()
    assert result.state == "REVOKED"
    assert stage.dead_letters() == []
