"""A real Prometheus server scrapes a real worker and counts its tasks exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.differences import RACES_WITH_ITSELF, differs
from tests.support.processes import eventually, free_port, stop

from .stage import app_of_this_module

app = app_of_this_module()

#: The program of Debian's package ``prometheus``. CI does not install it for this one test.
PROMETHEUS = shutil.which("prometheus")

TASKS = 1_000


@app.task(base=SQSBackoffTask, name="scraped.noop", ignore_result=True)
def noop() -> None: ...


@contextmanager
def prometheus(directory: Path, target: int) -> Iterator[Callable[[str], float]]:
    """Run a Prometheus server, and yield a function that returns the value of a query."""
    assert PROMETHEUS is not None
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "celery", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def query(expr: str) -> float:
        url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expr)}"
        try:
            answer: Any = json.load(urllib.request.urlopen(url, timeout=5))
        except OSError:
            return -1.0  # it is still starting
        found = answer["data"]["result"]
        return float(found[0]["value"][1]) if found else 0.0

    try:
        yield query
    finally:
        stop(process)


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (Debian's package prometheus)")
@pytest.mark.skipif(differs(RACES_WITH_ITSELF), reason="this SQS server loses or repeats messages")
def test_counts_over_restarts(make_stage, tmp_path):
    """Prometheus counts 1,000 tasks exactly, even while the pool replaces its processes."""
    port = free_port()
    stage = make_stage(
        conf={"sqs_backoff": {"prometheus_port": port}, "worker_max_tasks_per_child": 150}
    )
    for _ in range(TASKS):
        stage.send("scraped.noop")
    with (
        stage.worker(concurrency=2, loglevel="WARNING"),
        prometheus(tmp_path, port) as query,
    ):
        counted = 'sum(sqs_backoff_runs_total{task="scraped.noop",outcome="succeeded"})'
        eventually(
            lambda: query(counted) >= TASKS,
            timeout=90,
            interval=0.5,
            message=lambda: f"counted: {query(counted)}",
        )
        stage.wait_until_settled()
        assert query(counted) == TASKS
        assert query("sum(sqs_backoff_runs_total)") == TASKS
        assert query("sum(sqs_backoff_received_total)") == TASKS
