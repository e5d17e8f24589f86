"""Nothing is lost, and nothing is sent twice unsaid, whatever SQS answers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_sqs_backoff import redrive
from celery_sqs_backoff.redrive import Ended, RedriveUnreachable
from celery_sqs_backoff.redrive import run as run_module
from celery_sqs_backoff.redrive.events import InDoubt, MessagesSent, Poison, Started
from celery_sqs_backoff.testing import LocalQueue
from tests.support.differences import RACES_WITH_ITSELF, differs
from tests.support.fault_proxy import (
    FaultProxy,
    drop_after,
    drop_before,
    failed_entries,
    http_error,
    throttled,
    unavailable,
)

from .redrive_stage import RedriveStage, ids_of

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

SEND, DELETE, RECEIVE = "SendMessageBatch", "DeleteMessageBatch", "ReceiveMessage"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_THREADS", 1)


@pytest.fixture(autouse=True)
def as_many_threads_as_the_server_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    if differs(RACES_WITH_ITSELF):
        monkeypatch.setattr(run_module, "MAX_THREADS", 1)


@pytest.fixture
def stage(sqs: SQSClient, proxy: FaultProxy, queue: LocalQueue) -> RedriveStage:
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def app(stage: RedriveStage) -> Celery:
    return stage.app


@pytest.fixture
def fill(stage: RedriveStage) -> Callable[[int], list[str]]:
    """Put numbered messages on the dead-letter queue."""
    return stage.fill_numbered


@pytest.fixture
def drain(stage: RedriveStage) -> Callable[[LocalQueue], Counter[str]]:
    """Take all visible messages off a queue; how often each body was there."""
    return stage.bodies


def test_every_message_moves_once_for_three_tenths_of_a_call(app, queue, fill, drain, proxy):
    bodies = fill(250)
    proxy.reset()
    report = redrive(app, queue.dlq.name)
    assert (report.sent, report.deleted, report.remaining) == (250, 250, 0)
    assert report.ended is Ended.DONE
    assert sum(count.calls for count in proxy.counts().values()) <= 75 + 8
    assert drain(queue) == Counter(bodies)


def test_entries_that_sqs_fails_are_sent_again_and_nothing_else_is(app, queue, fill, drain, proxy):
    """One entry in ten fails: what other tools delete unsent, or send twice."""
    bodies = fill(200)
    proxy.inject(failed_entries(actions=(SEND,), probability=0.1, seed=1))
    report = redrive(app, queue.dlq.name, include_unknown=True)
    assert proxy.counts()[SEND].faults > 0
    assert (report.sent, report.deleted, report.failed) == (200, 200, 0)
    assert drain(queue) == Counter(bodies)


@pytest.mark.parametrize(
    "fault",
    [
        unavailable(actions=(RECEIVE,), probability=0.2, seed=2),
        throttled(actions=(SEND,), probability=0.2, seed=3),
        throttled(actions=(DELETE,), probability=0.2, seed=4),
        failed_entries(actions=(DELETE,), probability=0.3, seed=5),
    ],
    ids=["receive-503", "send-throttled", "delete-throttled", "delete-entries"],
)
def test_errors_in_passing_leave_no_trace(app, queue, fill, drain, proxy, fault):
    bodies = fill(100)
    proxy.inject(fault)
    report = redrive(app, queue.dlq.name)
    assert sum(count.faults for count in proxy.counts().values()) > 0
    assert (report.sent, report.deleted, report.in_doubt) == (100, 100, 0)
    assert drain(queue) == Counter(bodies)


@pytest.mark.parametrize(
    "fault",
    [drop_after, drop_before, unavailable],
    ids=["answer-lost", "request-lost", "503"],
)
def test_what_is_sent_twice_was_named_as_in_doubt(app, queue, fill, drain, proxy, fault):
    bodies = fill(100)
    events: list[Any] = []
    proxy.inject(fault(actions=(SEND,), times=2))
    report = redrive(app, queue.dlq.name, include_unknown=True, on_event=events.append)
    found = drain(queue)
    assert set(found) == set(bodies)
    # Until a delete has worked one batch is sent at a time: both faults hit the first.
    assert report.in_doubt == len(ids_of(events, InDoubt)) == 10, "messages, not attempts"
    assert sum(found.values()) - len(bodies) == (20 if fault is drop_after else 0)


def bounce(sqs: SQSClient, queue: LocalQueue) -> None:
    """Dead-letter all messages of the main queue, as a worker does whose provider is down."""
    while batch := sqs.receive_message(
        QueueUrl=queue.url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
    ).get("Messages"):
        for message in batch:
            sqs.send_message(
                QueueUrl=queue.dlq.url,
                MessageBody=message["Body"],
                MessageAttributes=message["MessageAttributes"],
            )
            sqs.delete_message(QueueUrl=queue.url, ReceiptHandle=message["ReceiptHandle"])


def test_what_comes_back_is_poison_and_stops_the_run(app, queue, fill, drain, sqs, one_thread):
    """The provider is still down. The run sees its own messages again, and does not loop."""
    bodies = fill(60)
    events: list[Any] = []
    gone: Counter[str] = Counter()

    def on_event(event: object) -> None:
        events.append(event)
        if isinstance(event, Started):  # 60 are counted; with 40 gone, what comes back has room
            for _ in range(4):
                batch = sqs.receive_message(QueueUrl=queue.dlq.url, MaxNumberOfMessages=10)
                for message in batch["Messages"]:
                    gone[message["Body"]] += 1
                    sqs.delete_message(
                        QueueUrl=queue.dlq.url, ReceiptHandle=message["ReceiptHandle"]
                    )
        elif isinstance(event, MessagesSent):
            bounce(sqs, queue)

    report = redrive(app, queue.dlq.name, on_event=on_event)
    assert report.sent == 20
    assert report.returned == report.poison == len(ids_of(events, Poison)) >= 10
    assert report.ended is Ended.GATE
    assert drain(queue.dlq) + gone == Counter(bodies)  # given back, visible at once


def test_two_redrives_at_once_send_each_message_once(app, queue, fill, drain):
    bodies = fill(300)
    reports: list[Any] = []
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
def test_without_a_permission_a_redrive_says_so_and_loses_nothing(
    app, queue, fill, drain, proxy, action, sent, text
):
    """Without the right to delete no more than one batch is delivered and left."""
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


def test_without_the_right_to_show_messages_again_a_redrive_says_how_long_they_are_hidden(
    app, queue, fill, proxy
):
    fill(5)
    denied = http_error(
        403, "AccessDenied", actions=("ChangeMessageVisibilityBatch",), sender_fault=True
    )
    proxy.inject(denied)
    report = redrive(app, queue.dlq.name, task="none")
    assert (report.ended, report.skipped) == (Ended.DONE, 5)
    assert report.detail.startswith("5 messages that are left stay hidden for up to 15 minutes")
