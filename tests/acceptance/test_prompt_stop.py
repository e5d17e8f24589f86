"""An idle worker stops as soon as a stock Celery worker on the same queue does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import mean

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.workers import Worker

from .stage import Stage, app_of_this_module

app = app_of_this_module()

#: Workers of each kind. A stop takes longer or shorter by the moment of the loop in which it comes.
TRIES = 2

if os.environ.get("WITH_OUR_TASK") == "1":

    @app.task(base=SQSBackoffTask, name="stop.ours")
    def ours() -> None:
        pass


@app.task(name="stop.stock")
def stock() -> None:
    pass


def stop_seconds(worker: Worker) -> float:
    begun = time.monotonic()
    assert worker.stop(timeout=30) == 0
    return time.monotonic() - begun


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_stops_as_fast_as_stock(make_stage: Callable[..., Stage], pool: str) -> None:
    """SIGTERM ends an idle worker within 1.2 times stock Celery's time, in the same run."""
    stage = make_stage()
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    with ExitStack() as stack:
        workers = [
            (kind, stack.enter_context(stage.worker(pool=pool, env={"WITH_OUR_TASK": kind})))
            for kind in ("0", "1") * TRIES
        ]
        for kind, worker in workers:
            assert ("sqs_backoff.started" in worker.log()) == (kind == "1")
        for kind, worker in workers:
            seconds[kind].append(stop_seconds(worker))
    print(f"{pool}: stock {seconds['0']}, ours {seconds['1']}")  # noqa: T201
    assert mean(seconds["1"]) <= 1.2 * mean(seconds["0"]), seconds
