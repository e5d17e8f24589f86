"""What a worker remembers of an expired task, which ``--expired extend`` cannot change."""

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker import state
from celery.worker.request import Request


@pytest.fixture
def app():
    with Celery("revoked", set_as_current=False, broker="memory://") as app:
        app.conf.result_backend = "cache+memory://"
        yield app


def received(app, expires):
    """A task message, as a worker receives it."""
    amqp = app.amqp.as_task_v2("42", "mails.send", expires=expires)
    message = SimpleNamespace(
        headers=amqp.headers,
        body=amqp.body,
        payload=amqp.body,
        properties={"correlation_id": "42", "reply_to": None},
        delivery_info={},
        content_type="application/json",
        content_encoding="utf-8",
        ack=lambda *args: None,
        ack_log_error=lambda *args: None,
        reject_log_error=lambda *args: None,
    )

    if "mails.send" not in app.tasks:

        @app.task(name="mails.send")
        def send():
            pass

    return Request(
        message, app=app, task=app.tasks["mails.send"], hostname="h", connection_errors=()
    )


@pytest.fixture(autouse=True)
def _forget():
    yield
    state.revoked.discard("42")


def test_a_worker_that_saw_a_task_expire_throws_its_extended_self_away_for_three_hours(app):
    """So a task is extended in the dead-letter queue, before a worker sees it; one that a worker
    has already thrown away needs another worker, a restart, or three hours."""
    now = datetime.now(timezone.utc)
    assert received(app, now - timedelta(minutes=1)).revoked()
    assert received(app, now + timedelta(hours=1)).revoked()
    assert state.REVOKE_EXPIRES == 3 * 3600


def test_a_worker_that_did_not_runs_it(app):
    assert not received(app, datetime.now(timezone.utc) + timedelta(hours=1)).revoked()
