"""Which messages are run, and which go back to SQS until they are due."""

import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from celery.exceptions import InvalidTaskError
from celery.worker import state as worker_state

from celery_sqs_backoff.observe.events import DeadLettered
from celery_sqs_backoff.observe.stream import Events
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.memory import Memory
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker import messages, strategy, unreadable
from celery_sqs_backoff.worker.lease import Lease, State

from .test_receiver import Worker

URL = "https://sqs.example/1/q"


class FakeKeeper:
    """Frees the place, and remembers who was settled."""

    def __init__(self):
        self.memory = Memory()
        self.events = Events()
        self.settlements = []

    def clock(self):
        return 1_000.0

    def settled(self, lease):
        self.settlements.append(lease.state)
        lease.free()

    def ended(self, lease):
        """Forget a lost message."""


def a_lease(queue=None, **facts):
    return Lease(
        calls=None,
        queue=queue or Queue(URL, visibility_timeout_seconds=30),
        message={"ReceiptHandle": "h"},
        body="b",
        delivery=Delivery(
            **{"message_id": "m", "queue_url": URL, "received_at": time.time()} | facts
        ),
        received_at=1_000.0,
        keeper=FakeKeeper(),
        free=lambda: None,
    )


def due_in(seconds):
    return datetime.fromtimestamp(time.time() + seconds, timezone.utc).isoformat()


def test_a_task_that_is_not_due_for_long_goes_back_to_sqs_until_it_is():
    lease = a_lease()
    assert messages._goes_back_until_due(lease, {"eta": due_in(600)})
    assert lease.state is State.DEFERRED
    assert 599 <= lease.due_at - 1_000 <= 601


def test_a_long_visibility_timeout_does_not_keep_it_in_the_worker():
    """kombu makes queues of 1800 s. A hundred such tasks took up all places for 15 minutes."""
    lease = a_lease(Queue(URL, visibility_timeout_seconds=1800))
    assert messages._goes_back_until_due(lease, {"eta": due_in(60)})
    assert lease.state is State.DEFERRED


@pytest.mark.hazard("H10")
def test_a_task_that_is_due_beyond_twelve_hours_hops():
    lease = a_lease()
    assert messages._goes_back_until_due(lease, {"eta": due_in(7 * 86_400)})
    assert 43_000 < lease.due_at - 1_000 < 43_200


@pytest.mark.parametrize("seconds", [-5, 0, 10])
def test_a_task_that_is_due_soon_stays(seconds):
    lease = a_lease()
    assert not messages._goes_back_until_due(lease, {"eta": due_in(seconds)})
    assert lease.state is State.HELD


@pytest.mark.parametrize("eta", [None, "soon"])
def test_a_task_without_an_eta_stays(eta):
    assert not messages._goes_back_until_due(a_lease(), {"eta": eta})


def test_an_expired_task_is_left_to_celery():
    headers = {"eta": due_in(600), "expires": due_in(-1)}
    assert not messages._goes_back_until_due(a_lease(), headers)


def test_a_revoked_task_is_left_to_celery():
    worker_state.revoked.add("revoked-id")
    try:
        headers = {"eta": due_in(600), "id": "revoked-id"}
        assert not messages._goes_back_until_due(a_lease(), headers)
    finally:
        worker_state.revoked.clear()


def test_a_task_at_its_last_receive_is_not_deferred():
    """SQS would move it to the dead-letter queue at the next one."""
    lease = a_lease(receive_count=3, max_receive_count=3)
    assert not messages._goes_back_until_due(lease, {"eta": due_in(600)})


DAY = 86_400


def a_lease_near_the_end_of_retention(*, dlq_arn="arn:aws:sqs:us-east-1:1:dlq"):
    queue = Queue(URL, visibility_timeout_seconds=30, dlq_arn=dlq_arn)
    return a_lease(queue, sent_at=time.time() - 4 * DAY + 200, retention_seconds=4 * DAY)


def test_a_dead_letter_that_is_no_task_is_counted_under_no_name_of_its_sender():
    """A worker of yesterday's release must not empty a queue unseen, nor make a label a message."""
    seen = []
    for number in (1, 2):
        queue = Queue(URL, dlq_arn="arn:aws:sqs:us-east-1:1:dlq")
        lease = a_lease(queue, receive_count=3, max_receive_count=3)
        lease.keeper.events.subscribe(seen.append)
        headers = {"task": f"of.tomorrow{number}", "id": "\ud800"}
        unreadable.keep(lease, headers, "task x is not registered here", worker="w")
        assert lease.state is State.DEAD_LETTERED
        assert lease.record.task == f"of.tomorrow{number}"
    letters = [event for event in seen if isinstance(event, DeadLettered)]
    assert [(e.task, e.reason) for e in letters] == [("unknown", "not understood")] * 2


def test_what_is_not_understood_is_a_dead_letter_before_retention_deletes_it(caplog):
    """With a maxReceiveCount of 1,000 the last receive comes later than that, or never."""
    lease = a_lease_near_the_end_of_retention()
    unreadable.keep(lease, {"task": "t"}, "task t is not registered here", worker="w")
    assert lease.state is State.DEAD_LETTERED
    assert lease.record.reason == "not understood: task t is not registered here"
    lease = a_lease_near_the_end_of_retention(dlq_arn=None)
    unreadable.keep(lease, {"task": "t"}, "task t is not registered here", worker="w")
    assert lease.state is State.DEFERRED


@pytest.mark.parametrize("seconds", [60, DAY])
def test_near_the_end_of_retention_a_task_is_held_until_it_is_due(seconds):
    """SQS deletes the message then, and the worker has the task in memory, as in Celery."""
    lease = a_lease_near_the_end_of_retention()
    assert not messages._goes_back_until_due(lease, {"eta": due_in(seconds)})
    assert lease.state is State.HELD


def test_the_keywords_of_start_strategy_are_forwarded(monkeypatch):
    """``Task.start_strategy(app, consumer, **kwargs)`` hands them on."""
    seen = {}
    monkeypatch.setattr(
        strategy, "celery_default", lambda task, app, consumer, **kwargs: seen.update(kwargs)
    )
    strategy.default(None, None, SimpleNamespace(), info=print, task_reserved=len)
    assert seen == {"info": print, "task_reserved": len}


@pytest.mark.parametrize(
    "payload",
    [5, [[], {}], [[], {}, [1]], [[], {}, {1: 2}], [5, {}, {}], [[], [], None], {"kwargs": []}],
)
def test_what_celery_would_fail_at_in_the_pool_does_not_reach_it(payload):
    """Pools but prefork would report nothing, and never give the process back."""
    with pytest.raises((InvalidTaskError, TypeError, ValueError)):
        strategy._check_arguments(payload)


@pytest.mark.parametrize(
    "payload",
    [[[1], {"a": 1}, None], [(), {}, {"chord": None}], {"args": [], "kwargs": {}}, {"task": "t"}],
)
def test_arguments_of_a_task_reach_the_pool(payload):
    strategy._check_arguments(payload)


@pytest.mark.parametrize("visibility_timeout", [1, 2, 30])
@pytest.mark.parametrize("seconds", [-3600, -0.5])
def test_a_task_that_is_due_runs_however_short_the_visibility_timeout(visibility_timeout, seconds):
    lease = a_lease(Queue(URL, visibility_timeout_seconds=visibility_timeout))
    assert not messages._goes_back_until_due(lease, {"eta": due_in(seconds)})
    assert lease.state is State.HELD


def test_a_message_that_is_lost_on_its_way_to_its_strategy_does_not_run(monkeypatch):
    """Without its lease it would be run as on another broker: a retry would publish a copy."""
    ran = []
    monkeypatch.setattr(
        strategy, "celery_default", lambda *args, **options: lambda *message: ran.append(message)
    )
    worker = Worker()
    worker.take(worker.message())
    [arrival] = worker.arrived
    consumer = SimpleNamespace(sqs_receiver=worker.receiver, hostname="h")
    handle = strategy.default(None, None, consumer)
    arrival.lease.lose()
    handle(SimpleNamespace(delivery_tag=arrival.tag, headers={}), None, None, None, [])
    assert ran == []
    assert worker.capacity.held == 0
