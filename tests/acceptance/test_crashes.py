"""Tasks whose process dies. The worker retries the message, and gives it up after some crashes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
from celery import chord
from celery.signals import task_failure, task_retry

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import KILLED, REDIS, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()

CRASH_BUDGET = 2

#: By name: how the task ends its process, and the reason that the dead letter then has.
CRASHES = {
    # The kernel kills a process like this when memory runs out.
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "worker lost"),
    "exits": (lambda: os._exit(1), "worker lost"),
    "segfaults": (lambda: ctypes.string_at(0), "worker lost"),
    "hangs": (lambda: time.sleep(60), "hard time limit"),
}


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="crashes.crash",
    crash_budget=CRASH_BUDGET,
    backoff=Schedule([1]),
)
def crash(self: Any, how: str, times: int) -> str:
    note(task="crashes.crash", how=how, id=self.request.id, times=times)
    # If a process dies before the pool knows that the task has begun, the pool begins the task
    # again in another process (celery/concurrency/asynpool.py, on_partial_read). The test would
    # then see two runs for one attempt.
    time.sleep(0.5)
    if self.request.retries < times:
        CRASHES[how][0]()
    return "alive"


@app.task(base=SQSBackoffTask, name="crashes.collect")
def collect(results: list[str]) -> list[str]:
    return results


@connect_in_worker(task_failure)
def note_failure(task_id: str, **_: Any) -> None:
    note(signal="task_failure", id=task_id)


@connect_in_worker(task_retry)
def note_retry(request: Any, **_: Any) -> None:
    note(signal="task_retry", id=request.id)


class Wreckage:
    """Run tasks that crash too often, crash once, or crash in a chord, and keep their results."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        main = stage.queues[0].name
        with stage.worker(concurrency=5, **KILLED):
            # Only the task that hangs has a time limit. The others would reach theirs if the pool
            # notices the death of their process late.
            self.hopeless = {
                how: stage.send("crashes.crash", how, 99, time_limit=2 if how == "hangs" else None)
                for how in CRASHES
            }
            self.once = stage.send("crashes.crash", "exits", 1)
            header = [
                stage.app.signature("crashes.crash", ("killed", times), queue=main)
                for times in (0, 98)
            ]
            body = stage.app.signature("crashes.collect", queue=main)
            self.chord = chord(header, app=stage.app)(body)
            stage.wait_until_settled(timeout=60)
            eventually(self.chord.ready, timeout=10)
            self.asked_to_hide = stage.delays_asked()
        self.letters = {d.record["id"]: d.record for d in stage.dead_letters() if d.record}

    def runs_of(self, task_id: str) -> list[dict[str, Any]]:
        return self.stage.record.entries(task="crashes.crash", id=task_id)


@pytest.fixture(scope="module")
def wreckage(make_scene):
    return Wreckage(make_scene(conf={"result_backend": REDIS}))


@pytest.mark.hazard("H4")
@pytest.mark.parametrize("how", CRASHES)
def test_crash_budget(wreckage, how):
    """A message whose task crashes too often becomes a dead letter with the reason."""
    result = wreckage.hopeless[how]
    record = wreckage.letters[result.id]
    assert (record["reason"], record["attempts"]) == (CRASHES[how][1], CRASH_BUDGET)
    assert len(wreckage.runs_of(result.id)) == CRASH_BUDGET
    assert result.state == "FAILURE"
    assert len(wreckage.stage.record.entries(signal="task_failure", id=result.id)) == 1


@pytest.mark.parametrize("how", CRASHES)
def test_delay(wreckage, how):
    """After a crash, the message stays hidden for a delay."""
    first, second = wreckage.runs_of(wreckage.hopeless[how].id)
    assert second["at"] - first["at"] >= 2


def test_no_loop(wreckage):
    """The worker gives no message back without a delay.

    With Celery's ``task_reject_on_worker_lost`` there is no delay, so the task could crash over and
    over.
    """
    assert wreckage.asked_to_hide
    assert 0 not in wreckage.asked_to_hide


@pytest.mark.hazard("H9")
@pytest.mark.parametrize("how", CRASHES)
def test_announcement(wreckage, how):
    """After a crash, the worker's main process sends ``task_retry``, for the dead process."""
    result = wreckage.hopeless[how]
    announced = wreckage.stage.record.entries(signal="task_retry", id=result.id)
    assert len(announced) == CRASH_BUDGET - 1


@pytest.mark.hazard("H19")
def test_fewer_crashes(wreckage):
    """A task that crashes less often than ``crash_budget`` allows runs again and succeeds."""
    assert wreckage.once.get(timeout=5) == "alive"
    assert len(wreckage.runs_of(wreckage.once.id)) == 2
    assert wreckage.once.id not in wreckage.letters


@pytest.mark.hazard("H25")
def test_chord_of_crashes(wreckage):
    """A chord fails, and does not wait for ever, when one of its tasks crashes too often."""
    assert wreckage.chord.state == "FAILURE"
    [letter] = [r for task_id, r in wreckage.letters.items() if not_sent_alone(wreckage, task_id)]
    assert letter["reason"] == "worker lost"


def not_sent_alone(wreckage: Wreckage, task_id: str) -> bool:
    return all(run["times"] == 98 for run in wreckage.runs_of(task_id))
