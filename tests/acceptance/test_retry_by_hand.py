"""``self.retry()`` keeps the message where it can, and publishes a copy where it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Task

from celery_sqs_backoff import SQSBackoffTask
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


def note_run(task: Any, **more: Any) -> None:
    message = task.request.properties["delivery_info"]["sqs_message"]
    note(
        task=task.name,
        message_id=message["MessageId"],
        retries=task.request.retries,
        root=task.request.root_id,
        **more,
    )


@app.task(base=SQSBackoffTask, bind=True, name="polls")
def polls(self: Any, job: int) -> None:
    note_run(self, job=job)
    if self.request.retries < 2:
        self.retry(countdown=1)


@app.task(base=SQSBackoffTask, bind=True, name="same")
def same(self: Any, job: int, *, step: int) -> None:
    """Says again what has not changed."""
    note_run(self, job=job)
    if self.request.retries < 1:
        queue = self.request.delivery_info["routing_key"]
        self.retry(args=[job], kwargs={"step": step}, countdown=1, queue=queue)


@app.task(base=SQSBackoffTask, bind=True, name="goes_on")
def goes_on(self: Any, page: int) -> None:
    note_run(self, page=page)
    if page < 3:
        self.retry(args=[page + 1], countdown=0)


@app.task(base=SQSBackoffTask, bind=True, name="others_retry")
def others_retry(self: Any) -> None:
    """What a library does that knows Celery's tasks, not ours: it has published when it raises."""
    note_run(self)
    if self.request.retries < 1:
        raise Task.retry(self, countdown=0, throw=False)


def test_a_retry_with_a_countdown_keeps_the_message(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    with stage.worker():
        stage.send("polls", 7)
        stage.send("same", 7, kwargs={"step": 1})
        stage.wait_until_settled()
    for task, runs in {"polls": 3, "same": 2}.items():
        assert [run["retries"] for run in stage.runs(task)] == list(range(runs))
        assert len({run["message_id"] for run in stage.runs(task)}) == 1
        assert {run["job"] for run in stage.runs(task)} == {7}
    assert stage.delays_asked() == [1, 1, 1]
    assert stage.proxy.counts()["SendMessage"].calls == 0
    assert len(stage.asked("DeleteMessageBatch")) == 2
    assert stage.dead_letters() == []


def test_a_retry_with_other_arguments_replaces_the_message(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    with stage.worker():
        task_id = stage.send("goes_on", 1).id
        stage.wait_until_settled()
    runs = stage.runs("goes_on")
    assert [(run["page"], run["retries"]) for run in runs] == [(1, 0), (2, 1), (3, 2)]
    assert len({run["message_id"] for run in runs}) == 3
    assert {run["root"] for run in runs} == {task_id}
    assert stage.proxy.counts()["SendMessage"].calls == 2
    assert len(stage.asked("DeleteMessageBatch")) == 3
    assert stage.delays_asked() == []
    assert stage.dead_letters() == []


@pytest.mark.hazard("H1")
def test_somebody_elses_retry_does_not_multiply_messages(
    make_stage: Callable[..., Stage],
) -> None:
    """Keeping the original beside the copy would double the messages at each failure."""
    stage = make_stage()
    with stage.worker():
        stage.send("others_retry")
        stage.wait_until_settled()
    assert [run["retries"] for run in stage.runs("others_retry")] == [0, 1]
    assert stage.proxy.counts()["SendMessage"].calls == 1
    assert len(stage.asked("DeleteMessageBatch")) == 2
    assert stage.delays_asked() == []
