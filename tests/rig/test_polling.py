"""When a worker asks SQS for messages, for how many, and what does not stop it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from . import Rig
from .test_receiving import due_in, envelope, returns, send_raw


def asked(rig, queue="q"):
    """Return how many messages each receive from a queue asked for, and how long it might wait."""
    calls = [each.arguments for each in rig.calls("ReceiveMessage")]
    return [
        (each["MaxNumberOfMessages"], each["WaitTimeSeconds"])
        for each in calls
        if each["QueueUrl"].endswith(f"/{queue}")
    ]


def started(rig, **options):
    """Let a worker start, and its first receives be over."""
    rig.task(returns)
    worker = rig.start_worker(**options)
    rig.pass_time(0.1)
    return worker


def finish_running(rig):
    """Let all tasks end that run now."""
    for run in list(rig.worker.runs):
        run.finish()
    rig.pass_time(0.1)


# How often


def test_long_polls(rig):
    """An empty queue is asked by one long poll after the other."""
    started(rig)
    rig.pass_time(60)
    assert asked(rig) == [(4, 20)] * 4


def test_wait_time():
    """Without long polls an empty queue is asked at the user's interval, a backlog at once."""
    with Rig(broker_transport_options={"wait_time_seconds": 0, "polling_interval": 5}) as rig:
        started(rig)
        messages = [rig.send() for _ in range(8)]
        rig.pass_time(12)
        assert asked(rig) == [(4, 0)] * 2
        first, second = rig.calls("ReceiveMessage")
        assert second.at - first.at == pytest.approx(5, abs=0.1)
        for _ in messages:
            rig.run()
        assert rig.timeline.now - rig.calls("ReceiveMessage")[0].at < 20
        assert {each.fate for each in messages} == {"deleted"}


@pytest.mark.parametrize("seconds", [7, 60])
def test_wait_time_set(seconds):
    """A long poll lasts as long as the user has set, up to the longest of SQS."""
    with Rig(broker_transport_options={"wait_time_seconds": seconds}) as rig:
        started(rig)
        assert asked(rig) == [(4, min(seconds, 20))]


def test_quota_in_flight():
    """At the quota of messages in flight SQS does not let a long poll wait; the worker pauses."""
    with Rig(max_in_flight=3) as rig:
        started(rig, processes=2)
        messages = [rig.send() for _ in range(5)]
        rig.pass_time(10)
        assert len(rig.worker.held) == 3
        assert len(asked(rig)) < 15
        for _ in messages:
            rig.run()
        assert {each.fate for each in messages} == {"deleted"}


# How many


def test_batch_worth_a_call(rig):
    """A full window asks for nothing until the next batch is worth a call."""
    worker = started(rig, processes=2)
    assert asked(rig) == [(8, 20)]
    for _ in range(20):
        rig.send()
    rig.pass_time(0.1)
    calls = len(asked(rig))
    assert len(worker.held) == 8
    for held in (6, 4):
        finish_running(rig)
        assert len(worker.held) == held
        assert len(asked(rig)) == calls
    finish_running(rig)
    assert asked(rig)[calls] == (6, 20)


@pytest.mark.hazard("H21")
def test_one_message_per_receive(rig):
    """A receive from a FIFO queue brings one message, so SQS keeps the order of each group."""
    rig.queue("q.fifo", FifoQueue="true", ContentBasedDeduplication="true")
    rig.task(returns)
    for number in range(3):
        rig.send(args=[number], queue="q.fifo", MessageGroupId=f"g{number}")
    rig.start_worker(queues=["q.fifo"], processes=2)
    rig.pass_time(1)
    assert set(asked(rig, "q.fifo")) == {(1, 20)}
    assert len(rig.worker.held) == 3


def test_backlog(rig):
    """With a backlog and room further calls are under way, and these do not wait."""
    rig.queue()
    rig.task(returns)
    for _ in range(50):
        rig.send()
    rig.start_worker(processes=10)
    rig.pass_time(0.1)
    first, *more = asked(rig)
    assert first == (10, 20)
    assert (10, 0) in more
    assert len(rig.worker.held) == 40


def test_no_backlog(rig):
    """Without a backlog only the long poll is under way."""
    started(rig, processes=10)
    for _ in range(3):
        rig.send()
    rig.pass_time(30)
    assert {wait for _, wait in asked(rig)} == {20}


def test_rate_limited_task_leaves_place(rig):
    """A task that waits in Celery for its rate limit leaves its place to others."""
    rig.task(returns, rate_limit="1/h")
    rig.task(lambda self: None, name="other")
    messages = [rig.send() for _ in range(7)]
    rig.run()
    other = rig.send("other")
    rig.pass_time(1)
    assert other.task_id in [run.task_id for run in rig.worker.runs]
    assert [each.fate for each in messages[1:]] == ["held"] * 6


def test_settlements_unconfirmed(rig):
    """A queue whose settlements SQS does not confirm is not received from; other queues are."""
    rig.queue("other")
    stuck = rig.queue("stuck", VisibilityTimeout="3600")
    rig.task(returns)
    expired = envelope(rig, rig.send(queue="stuck"), expires="2020-01-01T00:00:00+00:00")
    for _ in range(1_200):
        send_raw(rig, expired, "stuck")
    rig.fault("DeleteMessageBatch", ConnectionError(), seconds=120, queue=stuck)
    rig.start_worker(queues=["stuck", "other"], processes=50)
    rig.pass_time(30)
    calls = len(asked(rig, "stuck"))
    rig.pass_time(60)
    assert len(asked(rig, "stuck")) == calls
    message = rig.send(queue="other")
    rig.pass_time(1)
    assert message.receives == 1
    rig.pass_time(90)
    assert len(asked(rig, "stuck")) > calls


# Failures


def test_failures_spaced(rig):
    """Receives that fail are repeated after growing pauses; observers hear of each and the end."""
    started(rig)
    rig.fault("ReceiveMessage", ConnectionError(), times=6)
    rig.pass_time(100)
    failed = [each.at for each in rig.calls("ReceiveMessage") if each.answer is None]
    pauses = [after - before for before, after in pairwise(failed)]
    assert [event.failures for event in rig.told("ReceiveFailed")] == [1, 2, 3, 4, 5, 6]
    assert [event.failures for event in rig.told("ReceivingAgain")] == [6]
    assert all(0.5 <= pause <= 10 for pause in pauses)
    assert pauses[-1] >= 5


@pytest.mark.hazard("0.1")
@pytest.mark.parametrize(
    "error", [RuntimeError("expired"), OSError(), MemoryError(), SystemExit()], ids=repr
)
def test_receive_raises(rig, error):
    """No exception of a receive ends the receiving, nor does it take up room."""

    def fail():
        raise error

    rig.during("ReceiveMessage", fail, times=5)
    started(rig)
    rig.pass_time(60)
    message = rig.send()
    rig.run()
    assert message.fate == "deleted"
    assert set(asked(rig)) == {(4, 20)}


def test_slow_attributes(rig):
    """Attributes that do not come for 10 seconds do not hold up each poll."""
    rig.queue()
    rig.task(returns)
    rig.fault("GetQueueAttributes", ConnectionError(), seconds=40)
    rig.start_worker()
    rig.during("GetQueueAttributes", lambda: rig.worker.freeze(10), times=2)
    messages = [rig.send() for _ in range(4)]
    at = rig.timeline.now
    for _ in messages:
        rig.run()
    assert {each.fate for each in messages} == {"deleted"}
    assert rig.timeline.now - at < 25


def test_attributes_once_a_minute(rig):
    """The queue's attributes are read again once a minute, also while there is no room."""
    started(rig)
    reads = len(rig.calls("GetQueueAttributes"))
    for _ in range(20):
        rig.send()
    rig.pass_time(600)
    assert 9 <= len(rig.calls("GetQueueAttributes")) - reads <= 11


# Answers that come late


def test_late_answer(rig):
    """A message whose answer came after its visibility timeout runs elsewhere, and not here."""
    rig.queue(VisibilityTimeout="30")
    late = started(rig)

    def stand_still():
        rig.start_worker()
        late.freeze(300)

    rig.during("ReceiveMessage", stand_still)
    message = rig.send()
    rig.pass_time(301)
    assert [len(worker.runs) for worker in rig.workers] == [0, 1]
    assert message.receives == 2
    rig.run()
    assert message.fate == "deleted"


def test_slow_adapter():
    """The age of all messages of a receive counts from their receive, however slow an adapter."""

    def adapter(body, attributes):
        if len(rig.workers) == 1:
            rig.start_worker()
        if rig.acting_worker is rig.workers[0]:
            rig.workers[0].freeze(12)

    with Rig(sqs_backoff={"foreign": {"q": adapter}}) as rig:
        rig.queue(VisibilityTimeout="30")
        rig.task(returns)
        for _ in range(3):
            send_raw(rig, "hello")
        message = rig.send()
        rig.start_worker()
        rig.pass_time(38)
        assert [len(worker.runs) for worker in rig.workers] == [0, 1]
        assert message.receives == 2


def test_answer_after_stop(rig):
    """Messages that still come while a worker stops are given back."""
    worker = started(rig, processes=2)
    first = rig.send()
    run = rig.begin()
    rig.during("ReceiveMessage", worker.stop)
    late = rig.send()
    rig.pass_time(1)
    assert worker.is_alive
    assert (late.fate, late.receives, len(worker.runs)) == ("visible", 1, 1)
    run.finish()
    assert first.fate == "deleted"


@pytest.mark.parametrize("messages", [1, 3])
def test_answer_after_end(rig, messages):
    """Messages that still come when a worker has stopped are given back at once."""
    worker = started(rig, processes=2)
    rig.during("ReceiveMessage", worker.stop)
    late = [rig.send() for _ in range(messages)]
    rig.pass_time(1)
    assert not worker.is_alive
    assert [(each.fate, each.receives) for each in late] == [("visible", 1)] * messages
    stopped = rig.timeline.now
    rig.start_worker()
    rig.begin()
    assert rig.timeline.now - stopped < 1


def test_message_waits_at_stop(rig):
    """No task starts once the worker was told to stop."""
    worker = started(rig)
    rig.during("ReceiveMessage", worker.signal_stop)
    message = rig.send()
    rig.pass_time(1)
    assert (message.fate, worker.runs) == ("held", [])
    worker.stop()
    assert message.fate == "visible"


def test_consumer_cancelled(rig):
    """A message of a queue that was cancelled while it was received is given back."""
    worker = started(rig)
    rig.during("ReceiveMessage", lambda: worker.cancel_consumer("q"))
    message = rig.send()
    rig.pass_time(60)
    assert (message.fate, message.receives, worker.runs) == ("visible", 1, [])
    assert worker.places_taken == 0


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_connection_lost_at_delivery(rig):
    """A message that is given back on its way to its task is not run here."""
    worker = started(rig)
    strategy = worker.celery.strategies["mail"]
    seen = []

    def lose(*args, **kwargs):
        worker.lose_connection()
        seen.append(len(worker.runs))
        strategy(*args, **kwargs)
        seen.append(len(worker.runs))

    worker.celery.strategies["mail"] = lose
    message = rig.send()
    rig.pass_time(0.1)
    assert seen[:2] == [0, 0]
    rig.run()
    assert (message.fate, worker.places_taken) == ("deleted", 0)


@pytest.mark.parametrize("is_reset", [False, True], ids=["once", "until it is reset"])
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_event_loop_refuses(rig, is_reset):
    """A message that the event loop refuses is not held, and comes again; the next ones run."""
    worker = started(rig)
    refused = rig.send()
    worker.fail_loop(RuntimeError("not now"))
    rig.pass_time(1)
    assert (refused.fate, worker.places_taken) == ("hidden", 0)
    if is_reset:
        worker.lose_connection()
    message = rig.send()
    rig.run()
    assert message.fate == "deleted"
    rig.pass_time(30)
    rig.run()
    assert refused.fate == "deleted"


# Pools that block the event loop


@pytest.mark.parametrize("pool", ["solo", "greenlets"])
def test_one_at_a_time(rig, pool):
    """Where a task blocks Celery's event loop, each waits until a process is free."""
    worker = started(rig, pool=pool)
    messages = [rig.send() for _ in range(3)]
    for _ in messages:
        rig.pass_time(1)
        assert len(worker.runs) == 1
        worker.runs[0].finish()
    rig.pass_time(1)
    assert {each.fate for each in messages} == {"deleted"}


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_eta_leaves_place(rig, pool):
    """Tasks that wait in the worker for their ETA leave their places to others, with solo too."""
    rig.task(returns)
    template = rig.send()
    rig.start_worker(pool=pool)
    rig.run()
    eta = due_in(rig, 12).isoformat()
    later = [send_raw(rig, envelope(rig, template, eta=eta, id=f"later{n}")) for n in range(6)]
    message = rig.send()
    rig.pass_time(1)
    assert [run.task_id for run in rig.worker.runs] == [message.task_id]
    assert {each.id for each in later} < rig.worker.held


def test_lost_in_the_queue(rig):
    """A message that was lost while it waited for a process gives its place back."""
    rig.queue(VisibilityTimeout="10")
    worker = started(rig, pool="solo")
    messages = [rig.send() for _ in range(2)]
    run = rig.begin()
    rig.fault("ReceiveMessage", ConnectionError(), seconds=40)
    rig.fault("ChangeMessageVisibilityBatch", ConnectionError(), seconds=40)
    rig.pass_time(30)
    run.finish()
    rig.pass_time(1)
    assert (worker.runs, worker.places_taken) == ([], 0)
    rig.pass_time(60)
    rig.run()
    assert {each.fate for each in messages} == {"deleted"}


def test_autoscaler_told_later(rig):
    """Limits that the autoscaler is told later count."""
    worker = started(rig)
    worker.celery.controller.autoscaler = scaler = SimpleNamespace(max_concurrency=1)
    for _ in range(60):
        rig.send()
    rig.pass_time(5)
    assert worker.places_taken <= 4
    scaler.max_concurrency = 10
    rig.pass_time(30)
    assert 30 < worker.places_taken <= 40
