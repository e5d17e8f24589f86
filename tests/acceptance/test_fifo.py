"""On FIFO queues, a retry holds up its own message group and no other.

``test_pools`` tests that a group keeps its order in every pool.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.differences import HIDDEN_GROUP_LOSES_ITS_ORDER, differs
from tests.support.processes import eventually
from tests.support.record import note

from .stage import KILLED, app_of_this_module

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="mail",
    retry_on=(ProviderDown,),
    backoff=Schedule([1, 1, 3600]),
    fifo_cap=1,
)
def mail(self: Any, name: str, failures: int = 0, seconds: float = 0) -> None:
    note(task="mail", name=name, retries=self.request.retries)
    time.sleep(seconds)
    if self.request.retries < failures:
        raise ProviderDown


@pytest.fixture(scope="module")
def scene(make_scene):
    """Run a worker with two processes. Two groups are retried; a third keeps one process busy."""
    fifo = {"fifo": True, "max_receive_count": 100}
    stage = make_scene(queues={"test": fifo, "cap": fifo})
    for n in range(3):
        stage.send("mail", f"a{n}", 2 if n == 0 else 0, MessageGroupId="a")
    stage.send("mail", "alone", 3, MessageGroupId="alone", queue="cap")
    with stage.worker(concurrency=2, options=("--prefetch-multiplier", "1"), **KILLED):
        stage.wait_until_settled()
        for n in range(3):
            stage.send("mail", f"b{n}", 0, 60, MessageGroupId="b")
        eventually(lambda: stage.record.entries(name="b0"), timeout=60)
        stage.send("mail", "c", MessageGroupId="c")
        eventually(lambda: stage.record.entries(name="c"), timeout=60)
    return stage


@pytest.mark.hazard("H3", "H21")
def test_retries(scene):
    """Messages that wait behind a retried message of their group are not counted as retried."""
    names = ("a0", "a1", "a2")
    found = [(e["name"], e["retries"]) for e in scene.runs("mail") if e["name"] in names]
    if differs(HIDDEN_GROUP_LOSES_ITS_ORDER):
        found.sort()
    assert found == [("a0", 0), ("a0", 1), ("a0", 2), ("a1", 0), ("a2", 0)]


@pytest.mark.hazard("H21")
def test_cap(scene):
    """``fifo_cap`` limits each delay. The third one of the schedule, an hour, becomes a second."""
    assert [delay for delay in scene.delays_asked("cap") if delay] == [1, 1, 1]


def test_other_groups(scene):
    """While a task of one group runs, the group's next message takes no process of the worker."""
    assert len(scene.record.entries(name="c")) == 1
    assert scene.record.entries(name="b1") == []
