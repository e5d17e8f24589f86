"""The connection to SQS is lost while tasks run: they run once, are deleted, and work goes on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from celery.signals import worker_ready

from celery_sqs_backoff import SQSBackoffTask
from tests.support.fault_proxy import expired_token, unavailable
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

#: As 30 s (SQS's default) are to an outage of 20 s.
VISIBILITY_TIMEOUT_SECONDS = 6
OUTAGE_SECONDS = 4


@app.task(base=SQSBackoffTask, name="reconnect.lasts")
def lasts(name: str, seconds: float) -> None:
    note(task="reconnect.lasts", name=name, what="start")
    time.sleep(seconds)
    note(task="reconnect.lasts", name=name, what="end")


@app.task(base=SQSBackoffTask, name="reconnect.fails")
def fails() -> None:
    raise ValueError("for good")


@worker_ready.connect(weak=False)
def lose_the_connection_on_request(sender: Any, **_: Any) -> None:
    """SIGUSR2: what Celery's event loop makes of a broker connection that breaks."""

    def break_off() -> None:
        raise ConnectionResetError("the test has cut the connection")

    def on_signal(*_: object) -> None:
        sender.hub.call_soon(break_off)

    if sender.hub is not None:
        signal.signal(signal.SIGUSR2, on_signal)


@pytest.mark.hazard("0.1", "H28")
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_an_outage_while_tasks_run_costs_neither_a_second_run_nor_a_delete(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    """One task ends during the outage, one after it; credentials expire (403) and come back."""
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}})
    assert stage.proxy is not None
    with stage.worker(pool=pool, concurrency=2) as worker:
        stage.send("reconnect.lasts", "ends-during", 2)
        stage.send("reconnect.lasts", "ends-after", OUTAGE_SECONDS + 2)
        eventually(lambda: len(stage.record.entries(what="start")) == 2)
        stage.proxy.unreachable(OUTAGE_SECONDS)
        stage.proxy.inject(expired_token(times=2))  # the first two calls when it is back
        stage.wait_until_settled(timeout=40)
        stage.send("reconnect.lasts", "afterwards", 0)
        stage.wait_until_settled(timeout=40)
        assert worker.is_running
    assert sum(count.faults for count in stage.proxy.counts().values()) == 2
    assert runs_that(stage, "end") == {"ends-during": 1, "ends-after": 1, "afterwards": 1}
    assert runs_that(stage, "start") == runs_that(stage, "end")
    assert stage.dead_letters() == []


@pytest.mark.hazard("0.2", "0.3", "H13", "H28")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_consumer_that_restarts_leaves_running_tasks_their_messages(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    """Celery's consumer starts anew after a broker error, with a channel of its own.

    Stock Celery makes the messages of running tasks visible again, forgets to delete them, and
    with version 5.7.0 polls no more.
    """
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}})
    with stage.worker(pool=pool, concurrency=2) as worker:
        for name in ("first", "second"):
            stage.send("reconnect.lasts", name, 4)
        eventually(lambda: len(stage.record.entries(what="start")) == 2)
        stage.send("reconnect.lasts", "waits-meanwhile", 0)
        os.kill(worker.pid, signal.SIGUSR2)
        eventually(lambda: "the test has cut the connection" in worker.log())
        stage.wait_until_settled(timeout=30)
        stage.send("reconnect.lasts", "afterwards", 0)
        stage.wait_until_settled(timeout=30)
        log = worker.log()
    assert "Connection to broker lost" in log
    expected = dict.fromkeys(["first", "second", "waits-meanwhile", "afterwards"], 1)
    assert runs_that(stage, "start") == runs_that(stage, "end") == expected
    deleted = [entry["ReceiptHandle"] for entry in stage.asked("DeleteMessageBatch")]
    assert len(deleted) == len(set(deleted)) == 4
    assert stage.dead_letters() == []


def test_a_worker_that_starts_while_sqs_is_away_does_not_take_the_dead_letter_queue_for_none(
    make_stage: Callable[..., Stage],
) -> None:
    """Without one, the message of a task that is given up would be deleted."""
    stage = make_stage()
    assert stage.proxy is not None
    stage.proxy.inject(unavailable(actions=("GetQueueAttributes",)))
    with stage.worker(pool="solo", concurrency=1):
        assert stage.proxy.counts()["GetQueueAttributes"].faults > 0
        stage.proxy.heal()
        task_id = stage.send("reconnect.fails").id
        stage.wait_until_settled()
    [letter] = stage.dead_letters()
    assert letter.record is not None
    assert letter.record["id"] == task_id


def runs_that(stage: Stage, what: str) -> Counter[str]:
    return Counter(entry["name"] for entry in stage.record.entries(what=what))
