"""The same promises in every pool: success, retry, failure, and a task longer than the hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 2


class ProviderDown(Exception):
    pass


@app.task(base=SQSBackoffTask, name="succeeds")
def succeeds() -> None:
    note(task="succeeds")


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="retries",
    retry_on=(ProviderDown,),
    backoff=Schedule([1, 2]),
)
def retries(self: Any) -> None:
    note(task="retries", retries=self.request.retries)
    if self.request.retries < 2:
        raise ProviderDown


@app.task(base=SQSBackoffTask, name="pools.fails")
def fails() -> None:
    note(task="pools.fails")
    raise ValueError


@app.task(base=SQSBackoffTask, name="pools.lasts")
def lasts(seconds: float) -> None:
    note(task="pools.lasts")
    time.sleep(seconds)


@pytest.mark.hazard("H12", "H14")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_each_message_ends_where_it_belongs(make_stage: Callable[..., Stage], pool: str) -> None:
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}})
    with stage.worker(pool=pool, concurrency=4):
        stage.send("pools.lasts", 3 * VISIBILITY_TIMEOUT_SECONDS)
        stage.send("retries")
        dead = [stage.send("pools.fails").id for _ in range(2)]
        for _ in range(5):
            stage.send("succeeds")
        stage.wait_until_settled()
    runs = Counter(entry["task"] for entry in stage.record.entries())
    assert runs == {"pools.lasts": 1, "retries": 3, "pools.fails": 2, "succeeds": 5}
    assert [run["retries"] for run in stage.runs("retries")] == [0, 1, 2]
    assert sorted(letter.record["id"] for letter in stage.dead_letters()) == sorted(dead)
    deleted = [entry["ReceiptHandle"] for entry in stage.asked("DeleteMessageBatch")]
    assert len(deleted) == len(set(deleted)) == 9
    assert stage.proxy.counts()["DeleteMessage"].calls == 0
    assert stage.proxy.counts()["SendMessageBatch"].entries == len(dead)  # the dead letters
    assert stage.proxy.counts()["ChangeMessageVisibility"].calls == 0
