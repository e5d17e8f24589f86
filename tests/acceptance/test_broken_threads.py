"""A worker whose thread has died says in time that it is unhealthy."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.signals import worker_ready

from celery_sqs_backoff import Provider, SQSBackoffTask
from celery_sqs_backoff.observe.health import diagnosis
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

_TRIGGER = "TEST_BREAK_THREADS"


@app.task(base=SQSBackoffTask, name="broken_threads.run")
def run() -> None:
    note(task="broken_threads.run")


@app.task(base=SQSBackoffTask, name="broken_threads.rated", provider=Provider("mail", rate="20/s"))
def rated() -> None:
    note(task="broken_threads.rated")


@worker_ready.connect(weak=False)
def break_on_demand(**_: Any) -> None:
    """In the worker: end the threads whose names begin with what the file says."""
    if path := os.environ.get(_TRIGGER):
        threading.Thread(target=_break_threads, args=(Path(path),), daemon=True).start()


def _break_threads(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)
    doomed = [t for t in threading.enumerate() if t.name.startswith(path.read_text())]
    while doomed := [thread for thread in doomed if thread.is_alive()]:
        for thread in doomed:  # again and again: they survive what is raised in a call
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("threads", "said"),
    [("sqs-poll-", "the poller of "), ("sqs-keeper", "the keeper has ")],
    ids=["poller", "keeper"],
)
def test_a_dead_thread_makes_the_worker_unhealthy_within_30_seconds(
    make_stage: Callable[..., Stage], tmp_path: Path, threads: str, said: str
) -> None:
    heartbeat, trigger = tmp_path / "heartbeat", tmp_path / "trigger"
    stage = make_stage(conf={"sqs_backoff": {"heartbeat": str(heartbeat)}})
    with stage.worker(env={_TRIGGER: str(trigger)}, concurrency=1) as worker:
        stage.send("broken_threads.run")
        eventually(lambda: stage.runs("broken_threads.run"), timeout=30)
        eventually(lambda: diagnosis(heartbeat, now=time.time()) is None, timeout=15)
        trigger.write_text(threads)
        found = eventually(lambda: diagnosis(heartbeat, now=time.time()), timeout=30)
        assert said in found
        worker.kill()


@pytest.mark.redis
def test_a_dead_thread_that_lets_messages_start_makes_the_worker_unhealthy(
    make_stage: Callable[..., Stage], tmp_path: Path, redis_vhost: str
) -> None:
    """Messages that wait for their slots were held for ever, and the worker was well."""
    heartbeat, trigger = tmp_path / "heartbeat", tmp_path / "trigger"
    store = {"store": redis_vhost, "namespace": "threads", "secret": "s" * 32}
    stage = make_stage(conf={"sqs_backoff": {"heartbeat": str(heartbeat), **store}})
    with stage.worker(env={_TRIGGER: str(trigger)}, concurrency=1) as worker:
        stage.send("broken_threads.rated")
        eventually(lambda: stage.runs("broken_threads.rated"), timeout=30)
        trigger.write_text("sqs-pace")
        time.sleep(1)  # until it is to end
        stage.send("broken_threads.rated")  # it wakes up
        found = eventually(lambda: diagnosis(heartbeat, now=time.time()), timeout=30)
        assert "the thread sqs-pace has died" in found
        worker.kill()
