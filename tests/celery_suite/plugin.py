"""A pytest plugin for Celery's own tests. It sets the class of all tasks, and notes each outcome.

It runs in the environment of the tested Celery (``-p tests.celery_suite.plugin``). So it imports
only packages that are installed there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

#: This variable names a file. The plugin writes lines of JSON to it, with a test's ID and outcome.
OUTCOMES = "CELERY_SUITE_OUTCOMES"
#: This variable names the class of all tasks, as ``package.module:Class``. Default: Celery's own.
TASK_CLASS = "CELERY_SUITE_TASK_CLASS"
#: Integration tests and their worker find the URL of their SQS in this variable.
BROKER = "CELERY_SUITE_BROKER"

_TIME_LIMIT_SECONDS = 30

#: Read at import, because some of Celery's tests clear the environment and do not restore it.
_OUTCOMES_FILE = Path(os.environ[OUTCOMES]) if OUTCOMES in os.environ else None

OPTIONS = {"region": "us-east-1", "is_secure": False, "wait_time_seconds": 1}


def pytest_configure(config: Any) -> None:
    """Set the class of all tasks, and start workers as processes, before a test makes an app."""
    from celery import Celery

    if task_class := os.environ.get(TASK_CLASS):
        Celery.task_cls = task_class
    if BROKER in os.environ:
        from celery.contrib.testing import app, worker

        app.DEFAULT_TEST_CONFIG["broker_transport_options"] = OPTIONS
        worker.start_worker = _worker_process


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Set a shorter time limit, because some integration tests wait for features that SQS lacks."""
    if BROKER in os.environ:
        for item in items:
            item.add_marker(pytest.mark.timeout(_TIME_LIMIT_SECONDS), append=False)


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test's call, and that of its set-up if the set-up does not pass."""
    outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    if _OUTCOMES_FILE is not None and (report.when == "call" or outcome != "passed"):
        with _OUTCOMES_FILE.open("a") as file:
            file.write(json.dumps([report.nodeid, outcome]) + "\n")


@contextmanager
def _worker_process(app: Any, **options: Any) -> Iterator[Any]:
    """Run a ``celery worker`` process instead of Celery's worker in a thread of the tests."""
    log = Path(tempfile.gettempdir()) / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "tests.celery_suite.worker_app", "worker"),
                *("--pool", "prefork", "--concurrency", "4", "--loglevel", "INFO"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, log)
        yield SimpleNamespace(hostname="celery@suite", pid=process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while " ready." not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.1)
