"""Metrics, heartbeat and status never stop a worker, even if they cannot start."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
from celery import Celery
from celery.worker import state

from celery_sqs_backoff.observe.board import QueueNow
from celery_sqs_backoff.observe.events import Events, MessageHidden
from celery_sqs_backoff.observe.health import Pulse
from celery_sqs_backoff.worker import observation as module
from celery_sqs_backoff.worker.observation import Observation, running
from tests.support.processes import eventually


def a_receiver(consumed: Iterable[str] = (), held: Iterable[Any] = ()) -> Any:
    keeper = SimpleNamespace(events=Events(), pulse=Pulse(), held=lambda: held)
    gates = SimpleNamespace(now=list)
    return SimpleNamespace(keeper=keeper, consumed=lambda: consumed, gates=gates)


@pytest.fixture
def observe() -> Iterator[Callable[..., Observation]]:
    made: list[Observation] = []

    def start(**settings: Any) -> Observation:
        app = Celery("observed", set_as_current=False)
        app.conf.sqs_backoff = settings
        observation = Observation(app, "w", a_receiver())
        made.append(observation)
        observation.start()
        return observation

    yield start
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prometheus_port": 70_000}, "metrics"),
        ({"prometheus_port": "metrics"}, "metrics"),
        ({"prometheus_port": [9808]}, "metrics"),
        ({"heartbeat": 5}, "heartbeat"),
        ({"heartbeat": "/tmp/a\0b"}, "heartbeat"),
    ],
    ids=str,
)
def test_wrong_settings(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    said: str,
) -> None:
    """The worker logs wrong settings of its observers, and starts."""
    observe(**settings)
    assert f"sqs_backoff.observer_failed: {said}: " in caplog.text


def test_port_taken(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the port for metrics is taken, the worker tries again until the port is free."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        observe(prometheus_port=port)
        assert caplog.text.count("no_metrics: port") == 1
    eventually(lambda: "sqs_backoff.metrics: http" in caplog.text)
    assert caplog.text.count("no_metrics: port") == 1, "it is logged once"
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert b"sqs_backoff_runs_total" in page.read()


def test_no_library_for_metrics(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the library for metrics, the worker still serves ``/healthz``.

    Otherwise a health probe would restart the worker.
    """
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    observe(prometheus_port=port)
    assert "pip install 'celery-sqs-backoff[prometheus]'" in caplog.text
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz?by=kubelet", timeout=5)
    assert page.read() == b"ok"
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_ends_first(observe: Callable[..., Observation], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops no longer tries to open its port."""
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        observe(prometheus_port=port).stop()
    with socket.socket() as probe:
        probe.settimeout(0.5)
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def a_lease(queue: str, sent_at: float) -> Any:
    delivery = SimpleNamespace(sent_at=sent_at)
    return SimpleNamespace(queue=SimpleNamespace(name=queue), delivery=delivery)


def test_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reports for each queue how many of its messages run, wait or are hidden.

    It reports queues that it consumes now, and queues of which it has hidden a message.
    """
    held = [a_lease("mails", 5.0), a_lease("mails", 7.0), a_lease("mails", 6.0)]
    receiver = a_receiver(["mails", "new"], held)
    observation = Observation(Celery("observed", set_as_current=False), "w", receiver)
    observation.start()
    receiver.keeper.events.emit(
        MessageHidden(queue="bulk", message_id="m", seconds=60, sent_at=8.0)
    )
    monkeypatch.setattr(module, "running", {"mails": 1, "bulk": 0, "new": 0}.__getitem__)
    assert observation.now().queues == {
        "mails": QueueNow(running=1, held=2, oldest_sent_at=5.0),
        "bulk": QueueNow(waiting=1, oldest_sent_at=8.0, oldest_due_at=8.0),
        "new": QueueNow(),
    }
    observation.stop()


def test_no_thread_left(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no thread can be started, the worker writes no status report, and logs this once."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    observe(store="redis://127.0.0.1:1/0")
    assert caplog.text.count("sqs_backoff.no_thread_left") == 1


class Request:
    """A stand-in for Celery's request, which can be in a set and has weak references."""

    def __init__(self, queue: str | None) -> None:
        info = {"sqs_queue": f"https://sqs.eu-central-1.amazonaws.com/1/{queue}"} if queue else {}
        self.message = SimpleNamespace(delivery_info=info)


class Changing(list[Request]):
    """A collection whose first two reads fail, as if another thread changed it."""

    looks = 0

    def __iter__(self) -> Iterator[Request]:
        self.looks += 1
        if self.looks < 3:
            raise RuntimeError("Set changed size during iteration")
        return super().__iter__()


def test_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker counts running tasks by queue, even while Celery changes its set of them."""
    requests = [Request("mails"), Request("mails"), Request("bulk"), Request(None)]
    for active in (requests, Changing(requests)):
        monkeypatch.setattr(state, "active_requests", active)
        assert (running("mails"), running("bulk"), running("other")) == (2, 1, 0)
