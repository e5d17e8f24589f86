"""Tasks without our base class also run as they should on a worker that has our package."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Reject

from celery_sqs_backoff import SQSBackoffTask
from tests.support.record import RECORD_FILE_VARIABLE, Record, note

from .stage import app_of_this_module

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 4
LONG_SECONDS = 9


@app.task(base=SQSBackoffTask, name="plain.covered")
def covered() -> None:
    """Make the worker load our package, because this task has our base class."""
    note(task="plain.covered")


@app.task(name="plain.late", acks_late=True)
def late() -> None:
    note(task="plain.late")
    time.sleep(LONG_SECONDS)


@app.task(name="plain.early")
def early() -> None:
    note(task="plain.early")


@app.task(name="plain.fails", acks_late=True)
def fails() -> None:
    note(task="plain.fails")
    raise ValueError


@app.task(name="plain.retries", bind=True, max_retries=1)
def retries(self: Any) -> None:
    note(task="plain.retries")
    raise self.retry(countdown=1)


@app.task(name="plain.eta")
def eta() -> None:
    note(task="plain.eta")


@app.task(name="plain.rejects", acks_late=True, bind=True)
def rejects(self: Any, times: int) -> None:
    """Reject the message and ask for it again, up to ``times`` times. Then reject it for good."""
    record = Record(Path(os.environ[RECORD_FILE_VARIABLE]))
    runs = len(record.entries(id=self.request.id))
    note(task="plain.rejects", id=self.request.id)
    raise Reject("no", requeue=runs < times)


@pytest.mark.hazard("H10", "H12", "H14")
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_plain_tasks(make_stage, pool):
    """A task without our base class runs once, unless it retries or rejects its message.

    All messages leave the queue.

    The visibility timeout is 4 s. One task takes 9 s, and another is due after 9 s.
    """
    queue = {
        "visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS,
        "dead_letter_queue": False,
    }
    stage = make_stage(queues={"test": queue})
    with stage.worker(pool=pool, concurrency=4):
        for name in ("late", "early", "fails", "retries", "covered"):
            stage.send(f"plain.{name}")
        stage.send("plain.rejects", 1)
        stage.send("plain.rejects", 0)
        in_time = datetime.now(timezone.utc) + timedelta(seconds=LONG_SECONDS)
        stage.send("plain.eta", eta=in_time)
        stage.wait_until_settled()
    assert Counter(run["task"] for run in stage.record.entries()) == {
        "plain.late": 1,
        "plain.early": 1,
        "plain.fails": 1,
        "plain.retries": 2,
        "plain.covered": 1,
        "plain.rejects": 3,
        "plain.eta": 1,
    }
