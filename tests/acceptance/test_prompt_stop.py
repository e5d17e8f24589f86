"""An idle worker stops as fast as a stock Celery worker on the same queue."""

from __future__ import annotations

import os
import time
from statistics import median
from threading import Thread

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.workers import Worker

from .stage import app_of_this_module

app = app_of_this_module()

#: The least and the most pairs of workers to stop. How long a stop takes depends on what the worker
#: is doing when the signal comes. So the test stops more pairs while the medians are not good.
PAIRS, MOST_PAIRS = 2, 7

if os.environ.get("WITH_OUR_TASK") == "ours":

    @app.task(base=SQSBackoffTask, name="stop.ours")
    def ours() -> None:
        pass


@app.task(name="stop.stock")
def stock() -> None:
    pass


def stop_all(workers: dict[str, Worker]) -> dict[str, float]:
    """Stop workers at the same time, and return how many seconds each took."""
    seconds: dict[str, float] = {}

    def stop(name: str, worker: Worker) -> None:
        begun = time.monotonic()
        assert worker.stop(timeout=30) == 0
        seconds[name] = time.monotonic() - begun

    threads = [Thread(target=stop, args=each) for each in workers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seconds.keys() == workers.keys()
    return seconds


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_stops_as_fast_as_stock(make_stage, pool):
    """SIGTERM ends an idle worker in at most 1.2 times the time of a stock worker (medians)."""
    stage = make_stage()
    stopped = []

    def is_as_fast():
        ours, stock = (median(each[kind] for each in stopped) for kind in ("ours", "stock"))
        return ours <= 1.2 * stock

    while len(stopped) < PAIRS or (not is_as_fast() and len(stopped) < MOST_PAIRS):
        options = {
            kind: {"pool": pool, "concurrency": 1, "env": {"WITH_OUR_TASK": kind}}
            for kind in ("stock", "ours")
        }
        with stage.workers(**options) as workers:
            for kind, worker in workers.items():
                assert ("sqs_backoff.started" in worker.log()) == (kind == "ours")
            stopped.append(stop_all(workers))
    print(f"{pool}: {stopped}")  # noqa: T201
    assert is_as_fast(), stopped
