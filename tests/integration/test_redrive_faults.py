"""A redrive loses no message when calls to SQS fail or another redrive runs."""

import threading
from collections import Counter

import pytest

from celery_sqs_backoff import redrive
from celery_sqs_backoff.redrive import Ended, RedriveUnreachable
from celery_sqs_backoff.redrive import run as run_module
from tests.support.differences import RACES_WITH_ITSELF, differs
from tests.support.fault_proxy import (
    http_error,
)

from .redrive_stage import RedriveStage

SEND, DELETE, RECEIVE = "SendMessageBatch", "DeleteMessageBatch", "ReceiveMessage"


@pytest.fixture(autouse=True)
def as_many_threads_as_the_server_stands(monkeypatch):
    if differs(RACES_WITH_ITSELF):
        monkeypatch.setattr(run_module, "MAX_THREADS", 1)


@pytest.fixture
def stage(sqs, proxy, queue):
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def app(stage):
    return stage.app


@pytest.fixture
def fill(stage):
    """Return a function that puts numbered messages on the dead-letter queue."""
    return stage.fill_numbered


@pytest.fixture
def drain(stage):
    """Return a function that takes all visible messages off a queue, and counts each body."""
    return stage.bodies


def test_calls_per_message(app, queue, fill, drain, proxy):
    """A redrive moves each message once, with at most 0.3 calls per message."""
    bodies = fill(250)
    proxy.reset()
    report = redrive(app, queue.dlq.name)
    assert (report.sent, report.deleted, report.remaining) == (250, 250, 0)
    assert report.ended is Ended.DONE
    assert sum(count.calls for count in proxy.counts().values()) <= 75 + 8
    assert drain(queue) == Counter(bodies)


def test_two_redrives(app, queue, fill, drain):
    """Two redrives at the same time send each message once."""
    bodies = fill(300)
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(redrive(app, queue.dlq.name)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        if differs(RACES_WITH_ITSELF):
            thread.join(60)
    for thread in threads:
        thread.join(60)
    assert sum(report.sent for report in reports) == 300
    assert drain(queue) == Counter(bodies)


@pytest.mark.parametrize(
    ("action", "sent", "text"),
    [
        ("GetQueueAttributes", None, "Cannot read the attributes of queue {dlq}: AccessDenied."),
        ("ListDeadLetterSourceQueues", None, "Cannot list the queues that have dead-letter queue"),
        (RECEIVE, 0, "ReceiveMessage: AccessDenied."),
        (SEND, 0, "SendMessageBatch to {main}: AccessDenied."),
        (DELETE, 10, "DeleteMessageBatch: AccessDenied."),
    ],
)
def test_missing_permission(app, queue, fill, drain, proxy, action, sent, text):
    """A redrive names a missing permission, and loses no message.

    Without the right to delete, it sends at most one batch, which stays on the dead-letter queue.
    """
    bodies = fill(30)
    proxy.inject(http_error(403, "AccessDenied", actions=(action,), sender_fault=True))
    text = text.format(dlq=queue.dlq.name, main=queue.name)
    if sent is None:
        with pytest.raises(RedriveUnreachable) as raised:
            redrive(app, queue.dlq.name)
        found = str(raised.value)
    else:
        report = redrive(app, queue.dlq.name)
        assert (report.ended, report.sent, report.not_deleted) == (Ended.UNREACHABLE, sent, sent)
        found = report.detail
    assert text in found
    assert "SQS refused the call. Allow the call to this identity" in found
    proxy.heal()
    moved = drain(queue)
    assert len(moved) == (sent or 0)
    assert set(drain(queue.dlq)) | set(moved) == set(bodies)


def test_no_right_to_show_again(app, queue, fill, proxy):
    """A redrive that is not allowed to give messages back reports how long they stay hidden."""
    fill(5)
    denied = http_error(
        403, "AccessDenied", actions=("ChangeMessageVisibilityBatch",), sender_fault=True
    )
    proxy.inject(denied)
    report = redrive(app, queue.dlq.name, task="none")
    assert (report.ended, report.skipped) == (Ended.DONE, 5)
    assert report.detail.startswith("5 messages that stay in the queue are hidden for up to 15")
