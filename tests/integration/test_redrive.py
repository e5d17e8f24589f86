"""Which messages a redrive of real queues sends, where to, when, and what they keep."""

import json
import socket
import time
from collections import Counter
from contextlib import suppress

import pytest
from botocore.config import Config

from celery_sqs_backoff.redrive import (
    Ended,
    RedriveRefused,
    RedriveUnreachable,
    peek,
    queues,
)
from celery_sqs_backoff.sqs import clients, find_queue
from celery_sqs_backoff.testing import local_sqs_settings
from tests.unit.test_docs import iam_action, shown_actions

from .redrive_stage import RedriveStage, record, task


@pytest.fixture
def stage(sqs, proxy, queue):
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def fifo(sqs, proxy, make_queue):
    return RedriveStage(sqs, proxy.endpoint, make_queue(fifo=True))


# Source and destination


@pytest.mark.parametrize(
    "source",
    [
        lambda s: s.queue.name,
        lambda s: s.queue.url,
        lambda s: s.queue.arn,
        lambda s: s.dlq.name,
        lambda s: s.dlq.url,
        lambda s: s.dlq.arn,
    ],
    ids=["name", "url", "arn", "dlq-name", "dlq-url", "dlq-arn"],
)
def test_names_of_source(stage, source):
    """A user can name the source of a redrive in six ways."""
    stage.fill("hello")
    assert stage.redrive(source(stage)).sent == 1
    assert stage.bodies(stage.queue) == Counter(["hello"])


def test_without_predefined_queues(stage):
    """A redrive finds queues that are not predefined."""
    stage.app.conf.broker_transport_options = {
        name: value
        for name, value in stage.app.conf.broker_transport_options.items()
        if name != "predefined_queues"
    }
    stage.fill("hello")
    assert stage.redrive(stage.queue.name).sent == 1


def test_given_destination(stage, make_queue, proxy):
    """If the user gives a destination, a redrive sends all messages there."""
    other = make_queue()
    stage.app.conf.update(local_sqs_settings(proxy.endpoint, stage.queue, other))
    stage.fill("hello", MessageAttributes=record(origin=stage.queue.arn))
    assert stage.redrive(to=other.name).sent == 1
    assert stage.bodies(other) == Counter(["hello"])


def test_fifo_to_standard(stage, fifo, proxy):
    """A redrive refuses to mix FIFO and standard queues."""
    stage.app.conf.update(local_sqs_settings(proxy.endpoint, stage.queue, fifo.queue))
    with pytest.raises(RedriveRefused, match="not of the same type"):
        stage.redrive(to=fifo.queue.name)


@pytest.mark.parametrize("named", [[], ["mails", "bulk", "sms"]], ids=["any", "predefined"])
def test_silent_sqs(stage, monkeypatch, named):
    """A redrive soon ends with an error if SQS accepts connections but does not answer.

    With botocore's own timeouts, or with all tries for each queue, this would take minutes.
    """
    soon = {"connect_timeout": 0.3, "read_timeout": 0.3, "retries": {"total_max_attempts": 2}}
    monkeypatch.setattr(find_queue, "_SOON", soon)
    monkeypatch.setattr(clients, "_SETTLING", clients._SETTLING.merge(Config(read_timeout=0.3)))
    monkeypatch.setattr(queues, "_PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        urls = {name: {"url": f"http://{host}/000000000000/{name}"} for name in named}
        options = {"region": "us-east-1", "is_secure": False, "predefined_queues": urls}
        stage.app.conf.update(
            broker_write_url=f"sqs://k:s@{host}//", broker_transport_options=options
        )
        with pytest.raises(RedriveUnreachable, match="ReadTimeoutError"):
            peek(stage.app, "mails-dlq")
        silent.settimeout(0)
        calls = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                calls += 1
    assert calls == (1 if named else 2), "kombu itself connects twice"


# What a message keeps


def test_attributes_and_group(stage):
    """A message keeps its attributes and its group in a redrive."""
    own = {
        "text": {"DataType": "String", "StringValue": "é"},
        "number": {"DataType": "Number", "StringValue": "12"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    stage.fill("hello", MessageAttributes=own, MessageGroupId="tenant-1")
    stage.redrive()
    [message] = stage.take(stage.queue)
    kept = {
        name: {k: v for k, v in value.items() if k in ("DataType", "StringValue", "BinaryValue")}
        for name, value in message["MessageAttributes"].items()
        if name != "celery-sqs-backoff-replay"
    }
    assert kept == own
    assert message["Attributes"].get("MessageGroupId") == "tenant-1"


# Expired tasks


@pytest.mark.parametrize(("expired", "sent", "skipped"), [("leave", 1, 1), ("extend", 2, 0)])
def test_expired_tasks(stage, expired, sent, skipped):
    """A redrive leaves expired tasks, or extends their expiry on request.

    If it sent an expired task unchanged, a worker would delete the task.
    """
    stage.fill(task(), task(expires="2020-01-01T00:00:00+00:00"))
    report = stage.redrive(expired=expired)
    assert (report.sent, report.skipped) == (sent, skipped)
    for message in stage.take(stage.queue):
        expires = json.loads(message["Body"])["headers"].get("expires", "9999")
        assert expires > "2026"


# Time


def test_spread(stage, proxy):
    """With ``spread``, a redrive gives each message its own delay."""
    proxy.record("SendMessageBatch")
    stage.fill_numbered(60)
    stage.redrive(spread="10m")
    delays = [
        entry.get("DelaySeconds", 0)
        for request in proxy.requests("SendMessageBatch")
        for entry in request["Entries"]
    ]
    assert max(delays) <= 600
    assert len(set(delays)) > 30
    assert max(delays) > 450


def test_parked_message(stage, proxy):
    """A redrive sends a parked message with the rest of its delay.

    A worker parks a message in the dead-letter queue if too many messages are hidden.
    """
    proxy.record("SendMessageBatch")
    stage.fill(
        "x",
        MessageAttributes=record(reason="parked", due_at=time.time() + 200, origin=stage.queue.arn),
    )
    stage.redrive()
    [request] = proxy.requests("SendMessageBatch")
    assert 100 <= request["Entries"][0]["DelaySeconds"] <= 200


# The provider


def test_provider_is_down(stage, proxy):
    """A redrive does not start while its probe says that the provider is down."""
    stage.fill_numbered(5)
    proxy.reset()
    report = stage.redrive(probe=lambda: False)
    assert (report.sent, report.remaining, report.ended) == (0, 5, Ended.GATE)
    assert "ReceiveMessage" not in proxy.counts()
    assert stage.events[-1].report == report  # the last event has the report, as always


# FIFO


def test_fifo_order(fifo, proxy):
    """A redrive of a FIFO queue keeps the groups and their order.

    It sends each message with a new deduplication ID.
    """
    proxy.record("SendMessageBatch")
    for n in range(6):
        fifo.sqs.send_message(
            QueueUrl=fifo.dlq.url,
            MessageBody=str(n),
            MessageGroupId="ab"[n % 2],
            MessageDeduplicationId=f"first-{n}",
        )
    assert fifo.redrive().sent == 6
    found = fifo.take(fifo.queue)
    for group in "ab":
        order = [m["Body"] for m in found if m["Attributes"]["MessageGroupId"] == group]
        assert order == sorted(order)
    assert len(found) == 6
    asked = [
        e["MessageDeduplicationId"]
        for r in proxy.requests("SendMessageBatch")
        for e in r["Entries"]
    ]
    assert all(id_.startswith("redrive-") for id_ in asked)


def test_fifo_takes_no_spread(fifo):
    """A redrive of a FIFO queue refuses ``spread``, because its messages cannot have own delays."""
    with pytest.raises(RedriveRefused, match="FIFO"):
        fifo.redrive(spread="1m")


# Archive


def test_archive_before_delete(stage, tmp_path, proxy):
    """A redrive with ``delete`` writes messages to the archive before it deletes them."""
    archive, seen = tmp_path / "a.jsonl", []
    stage.fill_numbered(30)

    def look(event):
        if type(event).__name__ == "Deleted":
            lines = {json.loads(x)["MessageId"] for x in archive.read_text().splitlines()}
            seen.append(set(event.ids) <= lines)

    stage.redrive(delete=True, dump=archive, on_event=look)
    assert seen
    assert all(seen)


# Peek


def test_peek(stage):
    """``peek`` counts the messages by task, reason and age, and gives them back."""
    stage.fill(task("mails.send"), MessageAttributes=record(origin=stage.queue.arn))
    stage.fill(task("sms.send"), "not celery's", task(expires="2020-01-01T00:00:00+00:00"))
    plan = peek(stage.app, stage.dlq.name, rate="1/s", ramp="10s")
    assert (plan.messages, plan.looked_at, plan.matching) == (4, 4, 4)
    assert plan.by_task == {"mails.send": 2, "sms.send": 1, "(no Celery message)": 1}
    assert plan.by_reason["retry_for is over"] == 1
    assert plan.by_age == {"under 1 h": 3, "over 4 d": 1}  # by the record, if there is one
    assert plan.by_destination == {stage.queue.name: 4}
    assert 345_000 < plan.oldest_expires_in_seconds <= 345_600
    assert 4 < plan.duration_seconds < 10
    assert sum(stage.bodies(stage.dlq).values()) == 4  # visible at once


def test_peek_at_sample(stage):
    """``peek`` at a sample of the messages estimates the figures of the whole queue."""
    stage.fill_numbered(40)
    plan = peek(stage.app, stage.dlq.name, sample=10, rate="10/s")
    assert (plan.looked_at, plan.to_send) == (10, 40)
    assert plan.duration_seconds == pytest.approx(4)


def test_rights(stage, proxy):
    """A redrive makes only calls that the table of rights in the docs lists."""
    stage.fill_numbered(12)
    proxy.reset()
    assert stage.redrive(task="none").skipped == 12
    assert stage.redrive().sent == 12
    asked = {iam_action(action) for action, count in proxy.counts().items() if count.calls}
    assert {"sqs:DeleteMessage", "sqs:SendMessage"} <= asked <= shown_actions(1)
