"""The whole worker is killed (SIGKILL, all of its processes) at different moments: nothing is lost.

Its messages come back when their visibility timeout ends, to whoever is there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import unavailable
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

TASKS = 6


class ProviderDown(Exception):
    pass


def options(name: str) -> dict[str, Any]:
    return {
        "base": SQSBackoffTask,
        "bind": True,
        "name": name,
        "retry_on": (ProviderDown,),
        "backoff": Schedule([2]),
    }


@app.task(**options("killed.succeeds"))
def succeeds(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="start")
    time.sleep(0.2)
    note(task=self.name, n=n, what="end")


@app.task(**options("killed.lasts"))
def lasts(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="start")
    if self.request.retries == 0:
        time.sleep(30)
    note(task=self.name, n=n, what="end")


@app.task(**options("killed.retries"))
def retries(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="start")
    if self.request.retries == 0:
        raise ProviderDown
    note(task=self.name, n=n, what="end")


@app.task(**options("killed.fails"))
def fails(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="start")
    raise ValueError


def is_running(stage: Stage) -> bool:
    return bool(stage.record.entries(task="killed.lasts", what="start"))


def has_ended_and_is_not_deleted(stage: Stage) -> bool:
    return bool(stage.asked("DeleteMessageBatch"))


def backs_off(stage: Stage) -> bool:
    return bool(stage.delays_asked())


def is_dead_lettered_and_not_deleted(stage: Stage) -> bool:
    return bool(stage.asked("SendMessageBatch")) and bool(stage.asked("DeleteMessageBatch"))


#: When to kill; with which tasks; what SQS refuses until then.
MOMENTS = {
    "killed.lasts": (is_running, ()),
    "killed.succeeds": (has_ended_and_is_not_deleted, ("DeleteMessageBatch",)),
    "killed.retries": (backs_off, ("ChangeMessageVisibilityBatch",)),
    "killed.fails": (is_dead_lettered_and_not_deleted, ("DeleteMessageBatch",)),
}


def test_whatever_the_worker_was_at_no_message_is_lost(make_stage: Callable[..., Stage]) -> None:
    """Each moment on a queue of its own; then one worker finds what the dead have left behind."""
    queues = {name.rpartition(".")[2]: {"visibility_timeout_seconds": 2} for name in MOMENTS}
    stage = make_stage(queues=queues)
    assert stage.proxy is not None
    for queue, (task, (moment, refused)) in zip(stage.queues, MOMENTS.items(), strict=True):
        stage.proxy.heal()
        stage.proxy.reset()
        for n in range(TASKS):
            stage.send(task, n, queue=queue)
        if refused:
            stage.proxy.inject(unavailable(actions=refused))
        with stage.worker(concurrency=2, queues=[queue.name]) as worker:
            eventually(lambda moment=moment: moment(stage), timeout=20)
            worker.kill()
        assert sum(stage.messages(queue)) == TASKS
    stage.proxy.heal()
    with stage.worker(pool="threads", concurrency=4):
        stage.wait_until_settled(timeout=40)

    for task in ("killed.lasts", "killed.succeeds", "killed.retries"):
        ended = stage.record.entries(task=task, what="end")
        assert {entry["n"] for entry in ended} == set(range(TASKS)), task
    letters = Counter(letter.record["task"] for letter in stage.dead_letters(stage.queues[-1]))
    assert letters.keys() == {"killed.fails"}
    assert TASKS <= letters.total() <= 2 * TASKS  # sent, and killed before the delete: a copy
    assert all(stage.dead_letters(queue) == [] for queue in stage.queues[:-1])
