"""A message that is no longer this worker's: the task is told, and its end changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.signals import lease_lost
from tests.support.differences import STALE_HANDLE_IS_REFUSED, differs
from tests.support.fault_proxy import unavailable
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

#: Deletes too: the task may end as soon as its lease is lost, before the message is received again.
SETTLING = ("ChangeMessageVisibilityBatch", "DeleteMessageBatch")


@app.task(base=SQSBackoffTask, bind=True, name="lost.lasts")
def lasts(self: Any, at_most_seconds: float, to_stop_seconds: float = 0) -> None:
    """Run until its lease is lost, and then for the time that it takes to stop."""
    note(task="lost.lasts", what="start")
    deadline = time.monotonic() + at_most_seconds
    while not self.lease_lost and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(to_stop_seconds)
    note(task="lost.lasts", what="end", lost=self.lease_lost)


@connect_in_worker(lease_lost)
def note_signal(sender: Any, message_id: str, queue: str, task_id: str, **_: object) -> None:
    note(task=sender.name, what="signal", message_id=message_id, queue=queue, id=task_id)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_task_learns_that_its_message_is_gone_and_leaves_it_alone(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    """Renewals fail until the message is visible again, and somebody else receives it."""
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 2}})
    with stage.worker(pool=pool, concurrency=1, options=("--prefetch-multiplier", "1")):
        stage.proxy.inject(unavailable(actions=SETTLING))
        # It stops slowly: a worker with a free process would receive its own message again.
        result = stage.send("lost.lasts", 15, 3)
        eventually(lambda: stage.record.entries(what="start"))
        [theirs] = eventually(
            lambda: stage.sqs.receive_message(
                QueueUrl=stage.queues[0].url, VisibilityTimeout=60, WaitTimeSeconds=5
            ).get("Messages")
        )
        stage.proxy.heal()
        eventually(lambda: stage.record.entries(what="end"), timeout=20)
    [end] = stage.record.entries(what="end")
    assert end["lost"]
    [signal] = stage.record.entries(what="signal")
    assert signal["id"] == result.id
    assert signal["message_id"] == theirs["MessageId"]
    assert signal["queue"] == stage.queues[0].name
    if differs(STALE_HANDLE_IS_REFUSED):
        assert stage.messages() == (0, 1), "it is the other's, and still hidden"
    else:
        assert stage.messages() in ((0, 1), (0, 0)), "what is done may be deleted for both"
    assert 0 not in stage.delays_asked(), "nobody's hold is cut short"


def test_a_message_that_comes_back_to_the_worker_that_runs_it_is_not_run_twice(
    make_stage: Callable[..., Stage],
) -> None:
    """Renewals fail for longer than the visibility timeout: SQS hands the message out again."""
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 2}})
    with stage.worker(concurrency=2):
        stage.proxy.inject(unavailable(actions=SETTLING))
        stage.send("lost.lasts", 4)
        eventually(lambda: stage.proxy.counts()["ReceiveMessage"].messages == 2)
        stage.proxy.heal()
        stage.wait_until_settled()
    assert len(stage.record.entries(what="start")) == 1
    assert len(stage.record.entries(what="end")) == 1
    assert stage.dead_letters() == []
