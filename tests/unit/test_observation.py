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
def test_settings_that_are_wrong_do_not_stop_the_worker(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    said: str,
) -> None:
    observe(**settings)
    assert said in caplog.text


def test_a_port_that_is_taken_is_had_when_it_is_free(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_health_is_served_where_the_library_for_metrics_is_missing(
    observe: Callable[..., Observation],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a probe that asks for it would restart the worker for ever."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    observe(prometheus_port=port)
    assert "sqs_backoff.no_metrics: builtins.ModuleNotFoundError" in caplog.text
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz?by=kubelet", timeout=5)
    assert page.read() == b"ok"
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_worker_that_ends_first_tries_no_more(
    observe: Callable[..., Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        observe(prometheus_port=port).stop()
    with socket.socket() as probe:
        probe.settimeout(0.5)
        assert probe.connect_ex(("127.0.0.1", port)) != 0
