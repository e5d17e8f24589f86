"""What a worker says of its queues when it starts."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
from celery import Celery, _state

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.testing import on_local_sqs, running_worker
from tests.support.processes import eventually

CHECK_UP = "celery_sqs_backoff.worker.check_up"


def mail() -> None:
    """Never run: what is said is said before."""


@pytest.fixture(autouse=True)
def no_tasks_of_others(monkeypatch):
    """Celery defines tasks of all apps of this process on each new one; here but its own."""
    theirs = _state._on_app_finalizers
    builtin = {define for define in theirs if define.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", builtin)


@pytest.fixture(autouse=True)
def no_stripe(monkeypatch):
    """A worker that has imported it is told of its hidden retries; other tests have imported it."""
    monkeypatch.delitem(sys.modules, "stripe", raising=False)


@pytest.fixture
def said(sqs_server, sqs_queue_factory, caplog):
    """Start a worker on a queue with these attributes, and return what it has said of it."""

    def start(queue, *, ignore=None, **task_options):
        app = Celery("start-up", set_as_current=False)
        made = sqs_queue_factory(**queue)
        ignored = {what.format(queue=made.name): why for what, why in (ignore or {}).items()}
        app.conf.sqs_backoff = {"ignore_findings": ignored}
        app.task(base=SQSBackoffTask, name="start_up.mail", shared=False, **task_options)(mail)
        with (
            caplog.at_level(logging.WARNING, CHECK_UP),
            on_local_sqs(app, sqs_server, made),
            running_worker(app),
        ):
            eventually(lambda: "sqs-check-up" not in {t.name for t in threading.enumerate()})
            return [r.getMessage() for r in caplog.records if r.name == CHECK_UP]

    return start


@pytest.mark.hazard("H3")
def test_too_few_receives(said):
    """The worker warns of a queue that allows too few receives for a task's retries."""
    [warning] = said({"max_receive_count": 5})
    assert "maxReceiveCount is 5" in warning
    assert "start_up.mail" in warning
