"""The same numbers over OpenTelemetry's API."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_sqs_backoff.observe.events import DeadLettered, Hidden, Received, Retried, RunEnded
from celery_sqs_backoff.observe.instruments import INSTRUMENTS, Kind
from celery_sqs_backoff.observe.metrics import Metrics
from celery_sqs_backoff.observe.opentelemetry import OpenTelemetryRecorder
from celery_sqs_backoff.observe.waiting import Waiting

OF_TASK: dict[str, Any] = {"queue": "q", "task": "t", "task_id": "1", "message_id": "m"}


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def metrics(reader: InMemoryMetricReader, waiting: Waiting) -> Metrics:
    provider = MeterProvider(metric_readers=[reader])
    return Metrics(OpenTelemetryRecorder(provider), waiting, running=lambda queue: 6)


def points(reader: InMemoryMetricReader) -> dict[tuple[str, frozenset[Any]], Any]:
    """Points by name and labels."""
    data = reader.get_metrics_data()
    return {
        (metric.name, frozenset(point.attributes.items())): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_counters_histograms_and_gauges(
    metrics: Metrics, waiting: Waiting, reader: InMemoryMetricReader
) -> None:
    hidden = Hidden(queue="q", message_id="m", seconds=60)
    for event in (
        Received(queue="q", messages=3, asked_for=10),
        RunEnded(**OF_TASK, outcome="retryable", attempt=1),
        Retried(**OF_TASK, delay=60, attempt=1, outcome="retryable", reason="raised"),
        hidden,
        DeadLettered(**OF_TASK, reason="not retryable", outcome="unknown", attempt=1),
    ):
        waiting(event)
        metrics(event)
    found = points(reader)

    def point(name: str, **labels: str) -> Any:
        return found[f"sqs_backoff.{name}", frozenset({"queue": "q", **labels}.items())]

    assert point("runs", task="t", outcome="retryable").value == 1
    assert point("dead_letters", task="t", reason="not retryable").value == 1
    assert point("received").value == 3
    assert point("messages_running").value == 6
    assert point("messages_waiting").value == 0, "given up while it waited"
    delay = point("retry_delay", task="t")
    assert (delay.count, delay.sum) == (1, 60)
    assert delay.explicit_bounds[-1] == 12 * 3600


def test_each_instrument_has_a_name_of_its_own() -> None:
    names = [one.opentelemetry_name for one in INSTRUMENTS]
    assert len(set(names)) == len(names)
    for one in INSTRUMENTS:
        assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM)
        assert one.text.endswith(".") or ";" in one.text


_FORKS = """
import os

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_sqs_backoff.observe.events import Hidden, RunEnded
from celery_sqs_backoff.observe.metrics import Metrics
from celery_sqs_backoff.observe.opentelemetry import OpenTelemetryRecorder
from celery_sqs_backoff.observe.waiting import Waiting

reader = InMemoryMetricReader()
waiting = Waiting()
metrics = Metrics(OpenTelemetryRecorder(MeterProvider(metric_readers=[reader])), waiting)
ended = RunEnded(
    queue="q", task="t", task_id="1", message_id="m", outcome="retryable", attempt=1
)
for event in (ended, Hidden(queue="q", message_id="m", seconds=60)):
    waiting(event)
    metrics(event)


def export(process):
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                print(process, metric.name, flush=True)


if not os.fork():
    export("fork")
    os._exit(0)
os.wait()
export("main")
"""


def test_a_pool_process_exports_no_copy_of_what_was_counted_before_it_was_forked() -> None:
    """The SDK exports in forks too: of one series, numbers that went up and down."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], check=True, capture_output=True, text=True, timeout=60
    )
    exported = done.stdout.splitlines()
    assert {"main sqs_backoff.runs", "main sqs_backoff.messages_waiting"} <= set(exported)
    assert [line for line in exported if line.startswith("fork")] == []
