"""The task that the benchmarks measure, one version for each mechanism of retries.

The task notes when it ran, and may fail. It does nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from celery import Celery

from celery_sqs_backoff import Schedule, SQSBackoffTask

__all__ = ["RECORD_BYTES", "SCENARIOS", "TASK_NAME"]

TASK_NAME = "benchmarks.noop"

#: The delay of each retry in all scenarios. SQS has no shorter delay.
RETRY_DELAY_SECONDS = 1

#: How many executions of each task fail in the scenarios with retries.
FAILURES = int(os.environ.get("BENCH_FAILURES", "0"))

_RECORD = b"%020.6f\n"
RECORD_BYTES = 21


class Failing(Exception):
    """The error of a task in its first executions."""


@cache
def _record_file(pid: int) -> int:
    path = Path(os.environ["BENCH_RECORDS"], str(pid))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _ran() -> None:
    # All processes of a machine share the clock CLOCK_MONOTONIC.
    os.write(_record_file(os.getpid()), _RECORD % time.monotonic())


def _succeed(self: Any) -> None:
    _ran()


def _sleep(self: Any) -> None:
    _ran()
    time.sleep(float(os.environ["BENCH_SLEEP"]))


def _fail_first(self: Any) -> None:
    """Note the execution, and fail in the first ones. ``request.retries`` tells which one it is."""
    _ran()
    if self.request.retries < FAILURES:
        raise Failing


def _fail_first_receives(self: Any) -> None:
    """Note the execution, and fail in the first ones. SQS's receive count tells which one it is.

    ``request.retries`` stays 0 here, because kombu does not count the retries of its own backoff.
    """
    _ran()
    message = self.request.properties["delivery_info"]["sqs_message"]
    if int(message["Attributes"]["ApproximateReceiveCount"]) <= FAILURES:
        raise Failing


def _stock(app: Celery) -> None:
    app.task(_succeed, name=TASK_NAME, bind=True, acks_late=True)


def _stock_autoretry(app: Celery) -> None:
    app.task(
        _fail_first,
        name=TASK_NAME,
        bind=True,
        acks_late=True,
        autoretry_for=(Failing,),
        max_retries=FAILURES,
        retry_backoff=RETRY_DELAY_SECONDS,
        retry_backoff_max=RETRY_DELAY_SECONDS,
        retry_jitter=False,
    )


def _kombu_backoff(app: Celery) -> None:
    queue = app.conf.broker_transport_options["predefined_queues"][app.conf.task_default_queue]
    queue["backoff_tasks"] = [TASK_NAME]
    queue["backoff_policy"] = dict.fromkeys(range(1, FAILURES + 1), RETRY_DELAY_SECONDS)
    app.task(
        _fail_first_receives,
        name=TASK_NAME,
        bind=True,
        acks_late=True,
        acks_on_failure_or_timeout=False,
    )


def _ours(app: Celery) -> None:
    app.task(_succeed, name=TASK_NAME, bind=True, base=SQSBackoffTask)


def _ours_sleep(app: Celery) -> None:
    app.task(_sleep, name=TASK_NAME, bind=True, base=SQSBackoffTask)


def _ours_retry(app: Celery) -> None:
    app.task(
        _fail_first,
        name=TASK_NAME,
        bind=True,
        base=SQSBackoffTask,
        retry_on=(Failing,),
        backoff=Schedule([RETRY_DELAY_SECONDS]),
    )


#: The functions that add the task to an app, by scenario.
SCENARIOS: dict[str, Callable[[Celery], None]] = {
    "stock": _stock,
    "redis": _stock,
    "stock-autoretry": _stock_autoretry,
    "kombu-backoff": _kombu_backoff,
    "ours": _ours,
    "ours-retry": _ours_retry,
    "ours-sleep": _ours_sleep,
}
