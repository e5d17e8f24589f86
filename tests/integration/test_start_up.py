"""A worker checks its queues when it starts, and logs what it finds."""

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
    """Serve as the body of a task that never runs."""


@pytest.fixture(autouse=True)
def no_tasks_of_others(monkeypatch):
    """Keep tasks of other tests off the new app. Celery adds tasks of all apps to each new one."""
    theirs = _state._on_app_finalizers
    builtin = {define for define in theirs if define.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", builtin)


@pytest.fixture(autouse=True)
def no_stripe(monkeypatch):
    """Hide the module stripe, which other tests import. With it, a worker logs one more line."""
    monkeypatch.delitem(sys.modules, "stripe", raising=False)


@pytest.fixture
def said(sqs_server, sqs_queue_factory, caplog):
    """Return a function that starts a worker on a queue, and returns what the check has logged."""

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
    """A worker warns if a queue's ``maxReceiveCount`` is too small for the retries of a task."""
    [warning] = said({"max_receive_count": 5})
    assert "maxReceiveCount is 5" in warning
    assert "start_up.mail" in warning
