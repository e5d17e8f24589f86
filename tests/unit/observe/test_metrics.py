"""Metrics are folds over events."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from celery_sqs_backoff.observe.board import ProviderNow, WorkerNow
from celery_sqs_backoff.observe.events import (
    DeadLettered,
    Discarded,
    LeaseLost,
    MessageHidden,
    Polled,
    ProviderProbed,
    ReceiveFailed,
    Retried,
    RunEnded,
    Settled,
    WorkerEvent,
)
from celery_sqs_backoff.observe.metrics import INSTRUMENTS, Metrics
from celery_sqs_backoff.observe.waiting import Waiting

OF_TASK: dict[str, Any] = {"queue": "q", "task": "t", "task_id": "1", "message_id": "m"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def waiting(clock):
    return Waiting(clock)


@pytest.fixture
def providers():
    return []


@pytest.fixture
def metrics(registry, waiting, clock, providers):
    def now():
        queues = {"q": replace(waiting.now("q"), running=7)}
        return WorkerNow(queues=queues, providers=tuple(providers))

    made = Metrics(now, clock=clock)
    registry.register(made)
    return made


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"sqs_backoff_{name}", {"queue": "q", **labels})


def test_instruments():
    """Each metric has its own name and a sentence that explains it."""
    names = [one.name for one in INSTRUMENTS]
    assert len(set(names)) == len(names)
    for one in INSTRUMENTS:
        assert one.text.endswith(".") or ";" in one.text


SUCCESS = RunEnded(**OF_TASK, outcome="succeeded", attempt=3)
FAILURE = RunEnded(**OF_TASK, outcome="retryable", attempt=3)
RETRY = Retried(**OF_TASK, delay=10, attempt=1, outcome="retryable", reason="raised")
PARKED = DeadLettered(**OF_TASK, reason="parked", outcome="retryable", attempt=1)
REFUSED = Settled(queue="q", action="DeleteMessageBatch", failed=2, code="AccessDenied")
DONE = Settled(queue="q", action="DeleteMessageBatch", failed=0)
DELETE = {"action": "DeleteMessageBatch"}

#: Events, what a sample of a scrape is called then, its labels, and its value.
COUNTED: list[tuple[tuple[WorkerEvent, ...], str, dict[str, str], float]] = [
    ((FAILURE, FAILURE, SUCCESS), "runs_total", {"task": "t", "outcome": "retryable"}, 2),
    ((RETRY, RETRY), "retries_total", {"task": "t"}, 2),
    ((PARKED,), "dead_letters_total", {"task": "t", "reason": "parked"}, 1),
    ((Discarded(**OF_TASK),), "discarded_total", {"task": "t"}, 1),
    ((Polled(queue="q", message_ids=("a", "b")),), "received_total", {}, 2),
    ((Polled(queue="q"), Polled(queue="q")), "receives_total", {}, 2),
    ((ReceiveFailed(queue="q", code="x"),), "receive_failures_total", {"code": "x"}, 1),
    ((REFUSED, DONE), "calls_total", DELETE, 2),
    ((REFUSED, DONE), "call_failures_total", {**DELETE, "code": "AccessDenied"}, 2),
    ((LeaseLost(**OF_TASK),), "leases_lost_total", {"task": "t"}, 1),
]


@pytest.mark.parametrize(
    ("events", "name", "labels", "expected"), COUNTED, ids=[row[1] for row in COUNTED]
)
def test_counted(metrics, registry, events, name, labels, expected):
    """Each event is counted with its labels."""
    for event in events:
        metrics(event)
    assert value(registry, name, **labels) == expected


def test_instruments_have_rows():
    """Each instrument that counts events has a row above."""
    counting = {one.name for one in INSTRUMENTS if one.event}
    assert counting == {name for _, name, _, _ in COUNTED}


def test_hidden_message(metrics, waiting, registry, clock):
    """A hidden message counts as waiting until it is due."""
    metrics(Polled(queue="q"))
    for number, delay in enumerate((10, 20)):
        waiting(
            MessageHidden(
                queue="q",
                message_id=str(number),
                seconds=delay,
                sent_at=time.time() - 100 - delay,
            )
        )
    assert value(registry, "messages_running") == 7, "asked of the worker at the scrape"
    assert value(registry, "messages_waiting") == 2
    assert value(registry, "oldest_waiting_seconds") == pytest.approx(120, abs=5)
    clock.now += 10
    assert value(registry, "messages_waiting") == 1
    clock.now += 10
    assert value(registry, "messages_waiting") == 0
    assert value(registry, "oldest_waiting_seconds") == 0


def test_age_of_last_poll(metrics, registry, clock):
    """The age of the last poll grows until the next one succeeds."""
    metrics(Polled(queue="q"))
    clock.now += 30
    metrics(ReceiveFailed(queue="q", code="ServiceUnavailable"))
    assert value(registry, "poll_age_seconds") == 30
    metrics(Polled(queue="q"))
    assert value(registry, "poll_age_seconds") == 0


def test_providers(metrics, registry, providers):
    """The gauges of a provider are sums over its tenants, and are 0 while it is ok."""

    def values(name, label):
        samples = [s for f in registry.collect() for s in f.samples if s.name.endswith(name)]
        return {s.labels.get(label, ""): s.value for s in samples if s.labels["provider"] == "p"}

    providers += [
        ProviderNow(provider="p", tenant="a", state="paused", hidden=40),
        ProviderNow(provider="p", tenant="b", state="paused", hidden=2),
        ProviderNow(provider="p", tenant="c", state="recovering", rate=2.5, hidden=1, in_line=7),
        ProviderNow(provider="other", state="recovering", rate=9.0),
    ]
    assert values("provider_state", "state") == {"paused": 2, "recovering": 1}
    assert values("provider_rate", "") == {"": 2.5}
    assert values("provider_waiting", "place") == {"hidden": 43, "in line": 7}
    providers[:] = [ProviderNow(provider="p", state="ok")]
    assert values("provider_state", "state") == {"paused": 0, "recovering": 0}


def test_all_in_scrape(metrics, registry):
    """A scrape has each instrument."""
    metrics(Polled(queue="q"))
    found = {family.name for family in registry.collect()}
    assert found == {f"sqs_backoff_{one.name}".removesuffix("_total") for one in INSTRUMENTS}


def test_queue_without_name(metrics, registry):
    """An event of a provider creates no metrics of a queue without a name."""
    metrics(ProviderProbed(provider="p"))
    assert registry.get_sample_value("sqs_backoff_messages_waiting", {"queue": ""}) is None


def test_multiprocess_variable(tmp_path):
    """The metrics ignore ``PROMETHEUS_MULTIPROC_DIR``.

    The variable is set for the web processes of the same image, and the directory is gone.
    """
    code = (
        "from prometheus_client import CollectorRegistry\n"
        "from celery_sqs_backoff.observe.events import Polled\n"
        "from celery_sqs_backoff.observe.metrics import Metrics\n"
        "from celery_sqs_backoff.observe.board import WorkerNow\n"
        "registry, metrics = CollectorRegistry(), Metrics(WorkerNow)\n"
        "registry.register(metrics)\n"
        "for _ in range(7):\n"
        "    metrics(Polled(queue='q', message_ids=('m',)))\n"
        "print(registry.get_sample_value('sqs_backoff_received_total', {'queue': 'q'}))\n"
    )
    gone = tmp_path / "gone"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(gone)}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("7\n", "")
    assert not gone.exists()
