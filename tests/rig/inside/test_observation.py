"""What observes a worker starts, or is tried again; it never stops the worker."""

from __future__ import annotations

import logging
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from celery import Celery

from celery_sqs_backoff.observe.health import Pulse
from celery_sqs_backoff.observe.stream import Events
from celery_sqs_backoff.worker import observation as module
from celery_sqs_backoff.worker.observation import Observation
from tests.support.processes import eventually


@pytest.fixture
def observe() -> Iterator[Callable[..., Observation]]:
    made: list[Observation] = []

    def start(**settings: Any) -> Observation:
        app = Celery("observed", set_as_current=False)
        app.conf.sqs_backoff = settings
        observation = Observation(app, "w", events=Events(), pulse=Pulse(), running=lambda queue: 0)
        made.append(observation)
        observation.start()
        return observation

    yield start
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prometheus_port": 70_000}, "no_metrics"),
        ({"prometheus_port": "metrics"}, "no_metrics"),
        ({"prometheus_port": [9808]}, "no_metrics"),
        ({"heartbeat": 5}, "no_heartbeat"),
        ({"heartbeat": "/tmp/a\0b"}, "no_heartbeat"),
    ],
    ids=str,
)
def test_wrong_settings(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    said: str,
) -> None:
    """Settings that are wrong are logged, and do not stop the worker."""
    observe(**settings)
    assert said in caplog.text


def test_port_taken(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port that is taken is used as soon as it is free."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        observe(prometheus_port=port)
        assert caplog.text.count("no_metrics: port") == 1
    eventually(lambda: "sqs_backoff.metrics: http" in caplog.text)
    assert caplog.text.count("no_metrics: port") == 1, "said once"
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert b"sqs_backoff_runs_total" in page.read()


def test_no_library_for_metrics(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Health is served without the library for metrics; else a probe restarts the worker."""
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
    """A worker that ends before its port is free tries no more."""
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        observe(prometheus_port=port).stop()
    with socket.socket() as probe:
        probe.settimeout(0.5)
        assert probe.connect_ex(("127.0.0.1", port)) != 0
