"""FIFO queues: one message of a group at a time, in order, also when one of them backs off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.differences import HIDDEN_GROUP_LOSES_ITS_ORDER, differs
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

FIFO = {"test": {"fifo": True, "visibility_timeout_seconds": 20, "max_receive_count": 100}}


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="fifo.send",
    retry_on=(ProviderDown,),
    backoff=Schedule([1, 1, 3600]),
    fifo_cap=1,
)
def send(self: Any, group: str, n: int, failures: int = 0) -> None:
    note(task="fifo.send", group=group, n=n, retries=self.request.retries, what="start")
    time.sleep(0.1)
    if self.request.retries < failures:
        raise ProviderDown
    note(task="fifo.send", group=group, n=n, what="done")


def deliver(stage: Stage, group: str, n: int, **kwargs: Any) -> None:
    """Send one message; the stage's app sends by kombu, which takes the group as a property."""
    stage.send(
        "fifo.send",
        group,
        n,
        kwargs=kwargs,
        MessageGroupId=group,
        MessageDeduplicationId=f"{group}-{n}",
    )


@pytest.mark.hazard("H21")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_group_keeps_its_order_while_one_of_its_messages_backs_off(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    stage = make_stage(queues=FIFO)
    for n in range(5):
        for group in ("a", "b"):
            deliver(stage, group, n, failures=2 if (group, n) == ("a", 1) else 0)
    with stage.worker(pool=pool, concurrency=4):
        stage.wait_until_settled()
    assert in_order(stage, "done", "a") == in_order(stage, "done", "b") == [0, 1, 2, 3, 4]
    assert in_order(stage, "start", "a") == [0, 1, 1, 1, 2, 3, 4]
    assert stage.dead_letters() == []


def in_order(stage: Stage, what: str, group: str) -> list[int]:
    numbers = [e["n"] for e in stage.record.entries(what=what) if e["group"] == group]
    return sorted(numbers) if differs(HIDDEN_GROUP_LOSES_ITS_ORDER) else numbers


@pytest.mark.hazard("H3", "H21")
def test_messages_given_back_with_their_group_have_not_been_retried(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(queues=FIFO)
    for n in range(3):
        deliver(stage, "a", n, failures=2 if n == 0 else 0)
    with stage.worker(concurrency=2):
        stage.wait_until_settled()
    retries = [(e["n"], e["retries"]) for e in stage.record.entries(what="start")]
    if differs(HIDDEN_GROUP_LOSES_ITS_ORDER):
        retries.sort()
    assert retries == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]


@pytest.mark.hazard("H21")
def test_a_delay_on_a_fifo_queue_ends_at_its_own_cap(make_stage: Callable[..., Stage]) -> None:
    """The third delay of the schedule is an hour; ``fifo_cap`` makes it a second."""
    stage = make_stage(queues=FIFO)
    deliver(stage, "a", 0, failures=3)
    with stage.worker(concurrency=1):
        stage.wait_until_settled()
    assert [delay for delay in stage.delays_asked() if delay] == [1, 1, 1]
