"""A machine that has no thread left: the worker starts and stops all the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_sqs_backoff.worker.check_up import start_check_up
from celery_sqs_backoff.worker.upstream import give_back_before_soft_shutdown


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_worker_starts_without_background_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check of the queues is left out, with a log line."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    start_check_up(Celery("full", set_as_current=False), [])
    assert caplog.text.count("sqs_backoff.no_thread_left") == 1


def test_soft_shutdown_waits_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own wait still runs when the thread that gives messages back cannot start."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    waited: list[int] = []
    controller = SimpleNamespace(wait_for_soft_shutdown=lambda: waited.append(1))
    give_back_before_soft_shutdown(SimpleNamespace(controller=controller), lambda: None)
    controller.wait_for_soft_shutdown()
    assert waited == [1]
