"""A task runs when it is due and a process of the pool is free."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.testing import on_local_sqs
from tests.support.processes import eventually
from tests.support.record import note

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 2

#: This is longer than the visibility timeout, so stock Celery would run the task several times.
ETA_SECONDS = 5

LONG_SECONDS = 60


@app.task(base=SQSBackoffTask, bind=True, name="runs")
def runs(self: Any, name: str, seconds: float = 0) -> None:
    redelivered = self.request.delivery_info["redelivered"]
    note(task="runs", name=name, time=time.time(), redelivered=redelivered)
    time.sleep(seconds)


@app.task(base=SQSBackoffTask, name="limited", rate_limit="1/m")
def limited(name: str) -> None:
    note(task="limited", name=name)


class Scene:
    """Run three workers: for tasks due later, for long tasks, and with a pool that may grow."""

    def __init__(self, stage: Stage) -> None:
        assert stage.proxy is not None
        self.stage = stage
        options: dict[str, Any] = {
            "times": {
                "pool": "threads",
                "concurrency": 2,
                "queues": [stage[queue].name for queue in ("main", "fifo")],
            },
            "long": {
                "concurrency": 1,
                "options": ("--prefetch-multiplier", "4"),
                "queues": [stage["long"].name],
                **KILLED,
            },
            "growing": {
                "concurrency": 4,
                "options": ("--prefetch-multiplier", "1", "--autoscale", "4,1"),
                "queues": [stage["growing"].name],
                **KILLED,
            },
        }
        # The workers start before the messages are sent. On a busy machine, a worker could take
        # longer to start than some messages have to wait.
        with stage.workers(**options):
            self._send()
            eventually(lambda: len(self.runs_of("eta", "countdown", "fifo")) >= 3, timeout=60)
            stage.wait_until_settled("fifo", "long")
            eventually(
                lambda: stage.messages("main") == (0, 1),
                timeout=60,
                message="expected only the message that is due in two hours",
            )
            eventually(lambda: self.runs_of("growing 3"), timeout=60)

    def _send(self) -> None:
        stage, send = self.stage, self.stage.send
        assert stage.proxy is not None
        main, fifo, far = (stage[queue] for queue in ("main", "fifo", "far"))
        send("runs", "first", 3 * VISIBILITY_TIMEOUT_SECONDS, queue="long")
        send("runs", "behind", queue="long")
        send("runs", "not due", queue="growing", countdown=25)
        for n in range(6):
            send("limited", f"limited {n}", queue="growing")
        for n in (1, 2):
            send("runs", f"growing {n}", LONG_SECONDS, queue="growing")
        send("runs", "growing 3", queue="growing")

        self.sent_at = time.time()
        with on_local_sqs(app, stage.proxy.endpoint, main, fifo, far):
            runs.apply_async(("countdown",), countdown=ETA_SECONDS, queue=main.name)
            runs.apply_async(("an hour",), countdown=3600, queue=far.name)
            runs.apply_async(("fifo",), countdown=2, queue=fifo.name)
        # A producer without our task class sends these by name. Celery sets no DelaySeconds.
        now = datetime.now(timezone.utc)
        send("runs", "eta", eta=now + timedelta(seconds=ETA_SECONDS))
        send("runs", "far", eta=now + timedelta(hours=2))
        send("runs", "late", eta=now - timedelta(minutes=5))

    def runs_of(self, *names: str) -> list[dict[str, Any]]:
        return [run for run in self.stage.runs("runs") if run["name"] in names]


@pytest.fixture(scope="module")
def scene(make_scene):
    short = {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}
    held = {"visibility_timeout_seconds": 60}
    queues = {"main": short, "fifo": {"fifo": True, **short}, "long": short, "growing": held}
    queues["far"] = {}
    return Scene(make_scene(queues=queues))


@pytest.mark.hazard("H10")
def test_countdown(scene):
    """A countdown is sent as DelaySeconds, at most 15 minutes. FIFO queues have no such delay."""
    published = [
        entry.get("DelaySeconds", 0)
        for queue in ("main", "far", "fifo")
        for entry in scene.stage.asked("SendMessage", queue)
    ]
    assert published == [ETA_SECONDS, 900, 0]


@pytest.mark.hazard("H10")
@pytest.mark.parametrize("name", ["eta", "countdown", "fifo"])
def test_due(scene, name):
    """A task that is due after the visibility timeout runs once, and not early."""
    [run] = scene.runs_of(name)
    due = scene.sent_at + (2 if name == "fifo" else ETA_SECONDS)
    assert due <= run["time"] < due + 60


@pytest.mark.hazard("H10", "H11")
def test_not_due(scene):
    """The worker hides a message that is not due for the remaining time, and does not hold it."""
    hidden = sorted(scene.stage.delays_asked("main"))
    assert 1 <= hidden[0] <= ETA_SECONDS, "the ETA less the time until the worker has received it"
    assert 7200 - 30 <= hidden[-1] <= 7200
    assert scene.runs_of("far") == []


def test_late(scene):
    """A task whose ETA has passed runs at once."""
    [run] = scene.runs_of("late")
    [on_time] = scene.runs_of("eta")
    assert run["time"] < on_time["time"] - 1


@pytest.mark.hazard("H14")
def test_long_task(scene):
    """A task that takes three visibility timeouts runs once. So does a task that waits for it."""
    found = scene.runs_of("first", "behind")
    assert [run["name"] for run in found] == ["first", "behind"]
    assert not any(run["redelivered"] for run in found)
    assert all(delay >= 5 for delay in scene.stage.delays_asked("long")), "a renewal is too short"
    assert scene.stage.dead_letters("long") == []


def test_free_process(scene):
    """Messages that wait for an ETA or a rate limit take no process, and a pool may grow."""
    assert len(scene.runs_of("growing 1", "growing 2", "growing 3")) == 3
    assert scene.runs_of("not due") == []
    assert len(scene.stage.runs("limited")) <= 1
