"""The name of a worker in the store, and what Celery's strategy gets on another broker."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker.request import Request

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.worker import consume


def test_names_in_containers() -> None:
    """Two workers with the same hostname and pid, as in two containers, get different names."""
    code = (
        "import os; os.getpid = lambda: 1\n"
        "from types import SimpleNamespace\n"
        "from celery_sqs_backoff.worker.receive import name_among_workers\n"
        "print(name_among_workers(SimpleNamespace(hostname='mails@shop')))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert len({run.stdout for run in runs}) == 2
    assert all("mails@shop" in run.stdout for run in runs)


def test_strategy_of_another_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another broker, Celery's own strategy gets all its options and its own request class."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        consume,
        "celery_default",
        lambda task, app, consumer, **kwargs: seen.update(kwargs, request=task.Request),
    )
    task = SimpleNamespace(Request=SQSBackoffTask.Request)
    consume.strategy(task, None, SimpleNamespace(), info=print, task_reserved=len)
    assert seen == {"info": print, "task_reserved": len, "request": Request}
    assert task.Request == SQSBackoffTask.Request
