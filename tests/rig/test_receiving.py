"""Which received messages run, which wait, and which go back to SQS."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone

import pytest
from celery import Task

from celery_sqs_backoff import Retryable, Schedule

HOUR, DAY = 3600, 86_400


def returns(self, *args, **kwargs):
    return "done"


def fails(self):
    raise Retryable("down")


def due_in(rig, seconds):
    """Return an ETA as Celery writes it."""
    return datetime.fromtimestamp(rig.timeline.now + seconds, timezone.utc)


def send_raw(rig, body, queue="q"):
    """Send a message with this body, and return the fake SQS's message."""
    url = next(url for url in rig.sqs.queues if url.endswith(f"/{queue}"))
    sent = rig.sqs.send_message(QueueUrl=url, MessageBody=body)
    return next(m for m in rig.sqs.queues[url].messages if m.id == sent["MessageId"])


def assert_kept(rig, raw):
    """Check that a bad message is hidden and takes no place, and that a good message runs."""
    message = rig.send()
    rig.run()
    assert message.fate == "deleted"
    assert raw.visible_at > rig.timeline.now
    assert rig.worker.places_taken == 0


def envelope(rig, message, **changes):
    """Return the body of a message with some headers changed."""
    payload = json.loads(message._sent.body)
    payload["headers"] |= changes
    return json.dumps(payload)


# Places and leases


@pytest.mark.parametrize("process", ["the same worker", "another worker"])
def test_second_delivery(rig, process):
    """A worker that runs a message does not run it twice if SQS delivers it to the worker again."""
    rig.queue(VisibilityTimeout="10")
    rig.task(returns)
    rig.start_worker(processes=2)
    message = rig.send()
    run = rig.begin()
    rig.fault("ChangeMessageVisibilityBatch", ConnectionError(), seconds=25)
    if process == "another worker":
        rig.start_worker()
    rig.pass_time(60)
    assert message.receives >= 2
    first = rig.workers[0]
    assert len(first.runs) == 1
    run.finish()
    for other in rig.workers[1:]:
        for each in list(other.runs):
            each.finish()
    rig.pass_time(30)
    assert message.fate == "deleted"


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_lost_connection(rig):
    """When Celery loses its connection, the worker gives back messages that have not begun."""
    rig.task(returns)
    messages = [rig.send() for _ in range(4)]
    rig.pass_time(1)
    rig.worker.lose_connection()
    for _ in messages:
        rig.run()
    assert {each.fate for each in messages} == {"deleted"}
    assert rig.worker.places_taken == 0


# The queue's attributes


def attach_dlq(rig, url):
    rig.sqs.create_queue(QueueName="late-dlq", Attributes={})
    arn = next(q.arn for u, q in rig.sqs.queues.items() if u.endswith("late-dlq"))
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    rig.sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})


def test_dlq_attached_later(rig):
    """A worker notices within about a minute that a queue has got a dead-letter queue."""

    def breaks(self):
        raise ValueError("no such customer")

    url = rig.queue(dlq=False)
    rig.task(breaks)
    first = rig.send()
    rig.run()
    assert first.fate == "deleted"
    attach_dlq(rig, url)
    rig.pass_time(90)
    second = rig.send()
    rig.run()
    assert second.fate == "dead letter"


def test_dlq_attached_during_run(rig):
    """A message becomes a dead letter even if the dead-letter queue was added during its run."""

    def breaks(self):
        raise ValueError("no such customer")

    url = rig.queue(dlq=False)
    rig.task(breaks)
    message = rig.send()
    run = rig.begin()
    attach_dlq(rig, url)
    rig.pass_time(90)
    run.finish()
    rig.pass_time(1)
    assert message.fate == "dead letter"


def test_attributes_unavailable(rig):
    """A worker also receives from a queue if it cannot read the queue's attributes.

    It tries again to read them, but not often.
    """
    rig.queue()
    rig.task(returns)
    rig.fault("GetQueueAttributes", ConnectionError(), seconds=30)
    messages = []
    for _ in range(10):
        messages.append(rig.send())
        rig.run()
    assert {each.fate for each in messages} == {"deleted"}
    assert len(rig.calls("GetQueueAttributes")) <= 4


# Messages that no worker understands


@pytest.mark.parametrize("body", ["hello", "{", "[]", json.dumps({"headers": [1]})], ids=repr)
def test_not_a_task(rig, body):
    """A message that is no task stays on the queue, hidden, and does not hold up other messages."""
    rig.queue()
    rig.task(returns)
    raw = send_raw(rig, body)
    assert_kept(rig, raw)


@pytest.mark.parametrize(
    "change",
    [
        *({"body": 5}, {"body": "abc"}, {"body": None}, {"body": {"args": []}}),
        *({"properties": {"body_encoding": encoding}} for encoding in ("nosuch", [1])),
        *({"headers": {"compression": compression}} for compression in ("nosuch", "gzip", [1])),
    ],
    ids=repr,
)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_undecodable(rig, change, pool):
    """A message that kombu cannot decode stays on the queue, and takes no process."""
    rig.task(returns)
    rig.start_worker(pool=pool)
    good = json.loads(rig.send()._sent.body)
    rig.run()
    for name, value in change.items():
        good[name] = {**good[name], **value} if isinstance(good[name], dict) else value
    raw = send_raw(rig, json.dumps(good))
    assert_kept(rig, raw)


def test_compressed(rig):
    """A task runs even if its sender has compressed the body."""
    rig.task(returns)
    message = rig.send(compression="gzip")
    rig.run()
    assert message.fate == "deleted"


@pytest.mark.parametrize("last", ["receive", "retention"])
def test_unregistered_task(rig, last):
    """A task that no worker knows becomes a dead letter with a reason, at the last moment.

    That is at its last receive, or shortly before SQS would delete the message.
    """
    receives = 3 if last == "receive" else 1000
    rig.queue(max_receive_count=receives, MessageRetentionPeriod=str(DAY))
    rig.task(returns)
    message = rig.send("of.tomorrow")
    rig.worker  # noqa: B018 - starts
    rig.pass_time(DAY)
    assert message.fate == "dead letter"
    assert message.record.reason.startswith("not understood: task of.tomorrow is not registered")
    [letter] = rig.told("DeadLettered")
    assert (letter.task, letter.reason) == ("unknown", "not understood")


def test_unregistered_task_without_dlq(rig):
    """Without a dead-letter queue, a task that no worker knows stays hidden on the queue."""
    rig.queue(dlq=False, MessageRetentionPeriod=str(DAY))
    rig.task(returns)
    message = rig.send("of.tomorrow")
    rig.worker  # noqa: B018 - starts
    rig.pass_time(DAY - HOUR)
    assert message.fate == "hidden"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize(
    "payload",
    [
        *(5, [[], {}], [[], {}, [1]], [5, {}, {}], [[], [], None], {"kwargs": []}),
        *({"args": [], "kwargs": {}, "shadow": ["a"]}, {"args": [], "id": [1]}),
    ],
    ids=repr,
)
def test_wrong_arguments(rig, pool, payload):
    """If Celery cannot use the arguments of a message, it stays on the queue and takes no process.

    No copy is sent. When its channel closes, kombu would send a copy of a message that it holds.
    """
    rig.task(returns)
    rig.start_worker(pool=pool)
    good = json.loads(rig.send()._sent.body)
    rig.run()
    good["body"] = base64.b64encode(json.dumps(payload).encode()).decode()
    raw = send_raw(rig, json.dumps(good))
    assert_kept(rig, raw)
    rig.worker.stop()
    [queue] = (queue for url, queue in rig.sqs.queues.items() if url.endswith("/q"))
    assert queue.messages == [raw]


@pytest.mark.parametrize(
    "payload",
    [[[1], {"a": 1}, None], [[], {}, {"chord": None}], {"args": [1], "kwargs": {}}, {"args": [1]}],
    ids=repr,
)
def test_arguments(rig, payload):
    """A task runs with each form of arguments that Celery sends."""
    rig.task(returns)
    good = json.loads(rig.send()._sent.body)
    rig.run()
    good["body"] = base64.b64encode(json.dumps(payload).encode()).decode()
    raw = send_raw(rig, json.dumps(good))
    assert rig.run().result[0] == 0
    assert raw not in rig.sqs.queues[next(iter(rig.sqs.queues))].messages


def test_message_in_request(rig):
    """Celery's request has the SQS message and its queue, but no second copy of the body."""
    rig.task(returns)
    message = rig.send()
    rig.begin()
    info = rig.worker.requests[0].message.delivery_info
    assert info["sqs_queue"].endswith("/q")
    assert info["sqs_message"]["MessageId"] == message.message_id
    assert "Body" not in json.loads(json.dumps(info))["sqs_message"]


def test_attribute_unreadable(rig):
    """A message with a broken attribute does not hold up other messages of its receive."""
    rig.task(returns)
    broken, message = rig.send(), rig.send()
    broken._sent.receives = 0.5  # the receive count becomes 1.5, which the worker cannot read
    rig.run()
    assert (message.fate, broken.fate) == ("deleted", "hidden")


def test_celery_fails(rig):
    """A message on which Celery raises an error stays on the queue, and does not hold up others."""
    rig.task(returns)
    strategy = rig.worker.celery.strategies["mail"]

    def fail(*args, **kwargs):
        rig.worker.celery.strategies["mail"] = strategy
        raise TypeError("a list where a dict is due")

    rig.worker.celery.strategies["mail"] = fail
    broken, message = rig.send(), rig.send()
    rig.run()
    assert (message.fate, broken.fate) == ("deleted", "hidden")


# Tasks that are not due


@pytest.mark.parametrize("visibility_timeout", ["30", "1800"])
def test_eta_later(rig, visibility_timeout):
    """A message that is due in a minute or later waits hidden on SQS, not in the worker."""
    rig.queue(VisibilityTimeout=visibility_timeout)
    rig.task(returns)
    message = rig.send(eta=due_in(rig, 2000))
    rig.worker  # noqa: B018 - starts
    rig.pass_time(905)  # the longest delay of a new message is 900 s
    assert (message.fate, rig.worker.places_taken) == ("hidden", 0)
    assert message.delay == pytest.approx(2000 - 900, abs=3)
    rig.pass_time(1090)
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 2)


def test_eta_in_a_minute(rig):
    """A message that is due in a minute waits on SQS, even if the visibility timeout is longer.

    Queues that kombu makes have a visibility timeout of 1800 s.
    """
    rig.queue(VisibilityTimeout="1800")
    rig.task(returns)
    template = rig.send()
    rig.run()
    eta = due_in(rig, 60).isoformat()
    raw = send_raw(rig, envelope(rig, template, eta=eta, id="other"))
    rig.pass_time(1)
    assert rig.worker.places_taken == 0
    assert raw.visible_at - rig.timeline.now == pytest.approx(59, abs=2)
    rig.pass_time(59)
    rig.run()
    assert raw.receives == 2


def test_eta_near_end_of_retention(rig):
    """A worker holds a message until it is due if the queue's retention period ends soon."""
    rig.queue(MessageRetentionPeriod="1200")
    rig.task(returns)
    message = rig.send(eta=due_in(rig, 1100))
    rig.pass_time(1000)
    rig.worker  # noqa: B018 - starts
    rig.pass_time(90)
    assert message.fate == "held"
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 1)


@pytest.mark.parametrize("dlq", [True, False], ids=["dead-letter queue", "no dead-letter queue"])
def test_eta_beyond_retention(rig, dlq):
    """A worker gives a message up at once if SQS would delete it before it is due."""
    rig.queue(dlq=dlq, MessageRetentionPeriod=str(DAY))
    rig.task(returns)
    message = rig.send(eta=due_in(rig, DAY + 60))
    rig.worker  # noqa: B018 - starts
    rig.pass_time(HOUR)
    assert message.fate == ("dead letter" if dlq else "deleted")
    [letter] = rig.told("DeadLettered")
    assert letter.reason == "its ETA is after the end of the queue's retention period"
    assert letter.outcome == "not processed"
    assert message.result == "FAILURE"
    assert rig.worker.runs == []


@pytest.mark.hazard("H10")
def test_eta_beyond_12_hours(rig):
    """A worker hides a message that is due in a week for less than 12 hours at a time."""
    rig.queue(MessageRetentionPeriod=str(14 * DAY))
    rig.task(returns)
    message = rig.send(eta=due_in(rig, 7 * DAY))
    rig.worker  # noqa: B018 - starts
    rig.pass_time(7 * DAY - 60)
    assert max(change.seconds for change in rig.sqs.changes) < 12 * HOUR
    assert rig.worker.runs == []
    rig.pass_time(61)
    rig.run()
    assert message.fate == "deleted"


@pytest.mark.parametrize("seconds", [-HOUR, -0.5, 0, 10])
@pytest.mark.parametrize("visibility_timeout", ["1", "2", "30"])
def test_eta_soon(rig, seconds, visibility_timeout):
    """A message that is due in a few seconds waits in the worker and runs without a new receive."""
    rig.queue(VisibilityTimeout=visibility_timeout)
    rig.task(returns)
    template = rig.send()
    rig.run()
    raw = send_raw(rig, envelope(rig, template, eta=due_in(rig, seconds).isoformat(), id="other"))
    at = rig.timeline.now
    rig.run()
    assert rig.timeline.now - at == pytest.approx(max(0, seconds), abs=1.6)
    assert raw.receives == 1 or seconds > 0


def test_eta_unreadable(rig):
    """A message with an ETA that is no time does not stop the worker or other tasks."""
    rig.task(returns)
    template = rig.send()
    rig.run()
    send_raw(rig, envelope(rig, template, eta="soon", id="other"))
    message = rig.send()
    rig.pass_time(5)
    for run in list(rig.worker.runs):
        run.finish()
    rig.pass_time(1)
    assert message.fate == "deleted"


@pytest.mark.parametrize("seconds", [HOUR, 2 * DAY], ids=["not due", "never due"])
def test_expired(rig, seconds):
    """A worker deletes an expired message as REVOKED, even if its ETA is later."""
    rig.queue(MessageRetentionPeriod=str(DAY))
    rig.task(returns)
    message = rig.send(eta=due_in(rig, seconds), expires=due_in(rig, 1000))
    rig.pass_time(1001)
    rig.worker  # noqa: B018 - starts
    rig.pass_time(5)
    assert (message.fate, message.result) == ("deleted", "REVOKED")


def test_over_budget_behind_rate_limit(rig):
    """A worker gives a task up if its ``retry_for`` ends while it waits for Celery's rate limit."""
    rig.task(returns, backoff=Schedule([5]), retry_for=600, crash_budget=1, rate_limit="6/h")
    first, second = rig.send(), rig.send()
    second._sent.receives = 3  # as if other workers had received and lost it
    rig.run()
    rig.pass_time(900)
    assert (first.fate, second.fate) == ("deleted", "dead letter")
    assert second.record.reason == "retry_for is over"
    assert rig.worker.runs == []


def test_revoked_before_eta(rig):
    """A worker deletes a revoked message at its receive, even if it is not due."""
    rig.task(returns)
    message = rig.send(eta=due_in(rig, HOUR))
    rig.worker.revoke(message.task_id)
    rig.pass_time(901)
    assert (message.fate, message.result) == ("deleted", "REVOKED")


def test_eta_at_last_receive(rig):
    """At its last receive, a message waits in the worker until it is due.

    At one more receive, SQS would move it to the dead-letter queue.
    """
    rig.queue(max_receive_count=1)
    rig.task(returns)
    message = rig.send(eta=due_in(rig, 1500))
    rig.worker  # noqa: B018 - starts
    rig.pass_time(1490)
    assert message.fate == "held"
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 1)


# The pool


def test_pool_refuses(rig, monkeypatch):
    """If the pool refuses a task, its message comes back later, and the next task runs.

    A pool refuses a task that it cannot pickle, for example.
    """
    rig.task(returns)
    worker = rig.start_worker()
    apply = worker.celery.pool.on_apply

    def too_deep(*args, **options):
        monkeypatch.setattr(worker.celery.pool, "on_apply", apply)
        raise RecursionError

    monkeypatch.setattr(worker.celery.pool, "on_apply", too_deep)
    refused = rig.send()
    rig.pass_time(1)
    assert refused.fate == "hidden"
    message = rig.send()
    rig.run()
    assert message.fate == "deleted"


def test_plain_task_out_of_memory(rig):
    """The message of a task without our base class comes back after a MemoryError.

    Celery does not settle such a message.
    """
    rig.task(returns)
    rig.task(returns, name="plain", base=Task, acks_late=True)
    message = rig.send("plain")
    run = rig.begin()
    with pytest.raises(MemoryError):
        run.fail(MemoryError())
    rig.pass_time(1)
    assert (message.receives, rig.worker.places_taken) == (2, 1)
    rig.run()
    assert message.fate == "deleted"
