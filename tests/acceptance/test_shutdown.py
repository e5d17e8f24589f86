"""SIGTERM: what runs is finished, what has not started is given back at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


@app.task(base=SQSBackoffTask, bind=True, name="shutdown.lasts")
def lasts(self: Any, seconds: float) -> None:
    note(task="shutdown.lasts", id=self.request.id, what="start")
    time.sleep(seconds)
    note(task="shutdown.lasts", id=self.request.id, what="end")


@pytest.mark.hazard("H15")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_stopped_worker_finishes_what_runs_and_gives_back_the_rest(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    """The running task takes twice the visibility timeout: it must stay ours while we wait."""
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 3}})
    for _ in range(4):
        stage.send("shutdown.lasts", 6)
    with stage.worker(pool=pool, concurrency=1, options=("--prefetch-multiplier", "4")) as worker:
        eventually(lambda: stage.messages() == (0, 4), timeout=20)
        eventually(lambda: stage.record.entries(what="start"))
        worker.send(signal.SIGTERM)
        eventually(lambda: stage.messages() == (3, 1), timeout=5, message="not given back at once")
        assert worker.stop(timeout=30) == 0
        assert "Traceback" not in worker.log()
    [start] = stage.record.entries(what="start")
    [end] = stage.record.entries(what="end")
    assert start["id"] == end["id"]
    assert stage.messages() == (3, 0)
    assert len(stage.asked("DeleteMessageBatch")) == 1
    assert stage.dead_letters() == []
