"""What fails after a task has given its word changes nothing, in real workers of every pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import Retryable, Schedule, SQSBackoffTask
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

options = {"base": SQSBackoffTask, "bind": True, "backoff": Schedule([1])}


@app.task(name="word.cancelled", crash_budget=2, **options)
def cancelled(self: Any) -> None:
    note(task="word.cancelled")
    raise asyncio.CancelledError


@app.task(name="word.memory", crash_budget=2, **options)
def memory(self: Any) -> None:
    note(task="word.memory")
    raise MemoryError("x")


@app.task(name="word.flaky", **options)
def flaky(self: Any) -> None:
    note(task="word.flaky")
    if not self.request.retries:
        raise Retryable("down")


@app.task(name="word.shows", **options)
def shows(self: Any) -> Any:
    note(task="word.shows")
    return self.request.properties


#: Nothing listens there, and nobody waits long for it.
NO_BACKEND = {
    "result_backend": "redis://127.0.0.1:1/0",
    "result_backend_transport_options": {"retry_policy": {"max_retries": 0}},
    "redis_retry_on_timeout": False,
}


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_run_that_is_aborted_is_settled_and_its_place_is_free(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    stage = make_stage(conf={"result_backend": None})
    for name in ("word.cancelled", "word.memory", "word.shows"):
        stage.send(name)
    with stage.worker(pool=pool, concurrency=1):
        stage.wait_until_settled()
    found = [letter.record for letter in stage.dead_letters()]
    assert sorted(r["task"] for r in found if r) == ["word.cancelled", "word.memory"]
    assert {r["reason"] for r in found if r} == {"the run was aborted"}
    assert len(stage.runs("word.cancelled")) == len(stage.runs("word.memory")) == 2
    assert len(stage.runs("word.shows")) == 1


def test_without_a_result_backend_a_retry_is_not_lost(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(conf=NO_BACKEND | {"task_track_started": True})
    sender = stage.app
    sender.conf.result_backend = None
    for name in ("word.flaky", "word.shows"):
        stage.send(name)
    with stage.worker(concurrency=2):
        stage.wait_until_settled(timeout=60)
    assert stage.dead_letters() == []
    assert len(stage.runs("word.flaky")) == 2
    assert len(stage.runs("word.shows")) == 1
