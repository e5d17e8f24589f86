"""When a worker asks SQS for messages, how many it asks for, and which errors it survives."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from celery import Task
from celery.exceptions import ImproperlyConfigured

from . import Rig
from .test_receiving import due_in, envelope, returns, send_raw


def asked(rig, queue="q"):
    """Return for each receive from a queue how many messages it asked for, and its wait time."""
    calls = [each.arguments for each in rig.calls("ReceiveMessage")]
    return [
        (each["MaxNumberOfMessages"], each["WaitTimeSeconds"])
        for each in calls
        if each["QueueUrl"].endswith(f"/{queue}")
    ]


def started(rig, **options):
    """Start a worker, and wait until its first receives have ended."""
    rig.task(returns)
    worker = rig.start_worker(**options)
    rig.pass_time(0.1)
    return worker


def finish_running(rig):
    """Finish all tasks that are running."""
    for run in list(rig.worker.runs):
        run.finish()
    rig.pass_time(0.1)


# How often


def test_long_polls(rig):
    """A worker asks an empty queue with one long poll after the other."""
    started(rig)
    rig.pass_time(60)
    assert asked(rig) == [(4, 20)] * 4


def test_wait_time():
    """Without long polls, a worker asks an empty queue at the user's interval.

    If there is a backlog, it asks again at once.
    """
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
    """A long poll lasts as long as the user has set, at most 20 s, which is SQS's limit."""
    with Rig(broker_transport_options={"wait_time_seconds": seconds}) as rig:
        started(rig)
        assert asked(rig) == [(4, min(seconds, 20))]


def test_invalid_wait_time():
    """If ``wait_time_seconds`` is not a number, the worker's start names the setting."""
    with (
        Rig(broker_transport_options={"wait_time_seconds": "soon"}) as rig,
        pytest.raises(ImproperlyConfigured, match="invalid wait_time_seconds 'soon'"),
    ):
        started(rig)


def test_quota_in_flight():
    """A worker pauses between receives when the queue has reached its quota of messages in flight.

    SQS then answers a long poll at once.
    """
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
    """A worker with a full prefetch window waits with its receive until it has room for a batch."""
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
    """With a backlog and room for messages, a worker makes more receives, which do not wait."""
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
    """Without a backlog, a worker makes long polls only."""
    started(rig, processes=10)
    for _ in range(3):
        rig.send()
    rig.pass_time(30)
    assert {wait for _, wait in asked(rig)} == {20}


def test_rate_limited_task_leaves_place(rig):
    """A task that waits in Celery for its rate limit takes no place of the prefetch window."""
    rig.task(returns, rate_limit="1/h")
    rig.task(lambda self: None, name="other")
    messages = [rig.send() for _ in range(7)]
    rig.run()
    other = rig.send("other")
    rig.pass_time(1)
    assert other.task_id in [run.task_id for run in rig.worker.runs]
    assert [each.fate for each in messages[1:]] == ["held"] * 6


def test_settlements_unconfirmed(rig):
    """A worker stops receiving from a queue if SQS does not confirm its deletes.

    It goes on receiving from other queues.
    """
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
    """A worker repeats a failed receive after growing pauses.

    Observers get an event for each failure, and one when receives work again.
    """
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
    """After any exception in a receive, a worker goes on receiving as many messages as before."""

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
    """If a read of the queue's attributes takes 10 seconds, only few receives wait for it."""
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
    """A worker reads the queue's attributes once a minute, even if it has no room for messages."""
    started(rig)
    reads = len(rig.calls("GetQueueAttributes"))
    for _ in range(20):
        rig.send()
    rig.pass_time(600)
    assert 9 <= len(rig.calls("GetQueueAttributes")) - reads <= 11


# Responses that come late


def test_late_answer(rig):
    """A worker does not run a message if the response came after the visibility timeout.

    Another worker may already have received the message.
    """
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
    """A worker does not run a message if an adapter took longer than the visibility timeout.

    An adapter makes a task of a message that Celery did not send. The times of all messages of a
    receive add up.
    """

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
    """A worker that is stopping gives messages back that still arrive."""
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
    """A worker that has stopped gives messages back at once that still arrive."""
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
    """No task starts after the worker has got SIGTERM."""
    worker = started(rig)
    rig.during("ReceiveMessage", worker.signal_stop)
    message = rig.send()
    rig.pass_time(1)
    assert (message.fate, worker.runs) == ("held", [])
    worker.stop()
    assert message.fate == "visible"


def test_consumer_cancelled(rig):
    """A worker gives a message back if its queue was cancelled during the receive."""
    worker = started(rig)
    rig.during("ReceiveMessage", lambda: worker.cancel_consumer("q"))
    message = rig.send()
    rig.pass_time(60)
    assert (message.fate, message.receives, worker.runs) == ("visible", 1, [])
    assert worker.places_taken == 0


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_connection_lost_at_delivery(rig):
    """If the connection breaks while Celery takes a message, the worker gives the message back.

    The task runs when the worker receives the message again.
    """
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
    """If Celery's event loop refuses a message, the worker does not hold the message.

    SQS delivers the message again later. The next messages run.
    """
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
    """In a pool whose tasks block Celery's event loop, one task runs after the other."""
    worker = started(rig, pool=pool)
    messages = [rig.send() for _ in range(3)]
    for _ in messages:
        rig.pass_time(1)
        assert len(worker.runs) == 1
        worker.runs[0].finish()
    rig.pass_time(1)
    assert {each.fate for each in messages} == {"deleted"}


@pytest.mark.parametrize("acks_late", [False, True])
def test_plain_task_keeps_place(rig, acks_late):
    """A plain task keeps its place until its run ends, although Celery acks it when it begins."""
    rig.task(returns, name="other")
    rig.task(returns, base=Task, acks_late=acks_late)
    worker = rig.start_worker(pool="greenlets")
    messages = [rig.send() for _ in range(3)]
    for _ in messages:
        run = rig.begin()
        rig.pass_time(1)
        assert worker.runs == [run]
        run.finish()
    rig.pass_time(1)
    assert ({each.fate for each in messages}, worker.places_taken) == ({"deleted"}, 0)


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_eta_leaves_place(rig, pool):
    """Tasks that wait in the worker for their ETA take no place of the prefetch window."""
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
    """A waiting message that loses its lease frees its place in the prefetch window."""
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
    """If the autoscaler gets a higher limit later, the worker receives more messages."""
    worker = started(rig)
    worker.celery.controller.autoscaler = scaler = SimpleNamespace(max_concurrency=1)
    for _ in range(60):
        rig.send()
    rig.pass_time(5)
    assert worker.places_taken <= 4
    scaler.max_concurrency = 10
    rig.pass_time(30)
    assert 30 < worker.places_taken <= 40
