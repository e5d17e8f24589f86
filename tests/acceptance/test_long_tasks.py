"""A message stays hidden for as long as this worker has it, running or waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


@app.task(base=SQSBackoffTask, bind=True, name="long.lasts")
def lasts(self: Any, seconds: float) -> None:
    note(
        task="long.lasts", id=self.request.id, redelivered=self.request.delivery_info["redelivered"]
    )
    time.sleep(seconds)


@pytest.mark.hazard("H14")
def test_a_task_longer_than_the_visibility_timeout_runs_once_even_after_waiting_for_another(
    make_stage: Callable[..., Stage],
) -> None:
    """Visibility timeout 2 s: one task of 6 s, and another that waits behind it for 6 s."""
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 2}})
    with stage.worker(concurrency=1, options=("--prefetch-multiplier", "4")):
        first, second = stage.send("long.lasts", 6).id, stage.send("long.lasts", 1).id
        eventually(lambda: stage.messages() == (0, 2), timeout=10)
        assert stage.messages() == (0, 2)
        stage.wait_until_settled()
    runs = stage.runs("long.lasts")
    assert [run["id"] for run in runs] == [first, second]
    assert not any(run["redelivered"] for run in runs)
    assert stage.proxy.counts()["ReceiveMessage"].messages == 2
    assert all(delay >= 5 for delay in stage.delays_asked()), "a renewal never shortens the hold"
    assert stage.dead_letters() == []
