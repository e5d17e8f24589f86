"""Which messages are run, and which go back to SQS until they are due."""

import time
from datetime import datetime, timezone

import pytest
from celery.worker import state as worker_state

from celery_sqs_backoff.delivery import Delivery
from celery_sqs_backoff.queues import Queue
from celery_sqs_backoff.worker import strategy
from celery_sqs_backoff.worker.lease import Lease, State

from .test_request import URL, FakeKeeper


def a_lease(**facts):
    return Lease(
        client=None,
        queue=Queue(URL, visibility_timeout_seconds=30),
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
    assert strategy._defer_until_due(lease, {"eta": due_in(600)})
    assert lease.state is State.DEFERRED
    assert 599 <= lease.due_at - 1_000 <= 601


@pytest.mark.hazard("H10")
def test_a_task_that_is_due_beyond_twelve_hours_hops():
    lease = a_lease()
    assert strategy._defer_until_due(lease, {"eta": due_in(7 * 86_400)})
    assert 43_000 < lease.due_at - 1_000 < 43_200


@pytest.mark.parametrize("seconds", [-5, 0, 10])
def test_a_task_that_is_due_soon_stays(seconds):
    lease = a_lease()
    assert not strategy._defer_until_due(lease, {"eta": due_in(seconds)})
    assert lease.state is State.HELD


@pytest.mark.parametrize("eta", [None, "soon"])
def test_a_task_without_an_eta_stays(eta):
    assert not strategy._defer_until_due(a_lease(), {"eta": eta})


def test_an_expired_task_is_left_to_celery():
    headers = {"eta": due_in(600), "expires": due_in(-1)}
    assert not strategy._defer_until_due(a_lease(), headers)


def test_a_revoked_task_is_left_to_celery():
    worker_state.revoked.add("revoked-id")
    try:
        headers = {"eta": due_in(600), "id": "revoked-id"}
        assert not strategy._defer_until_due(a_lease(), headers)
    finally:
        worker_state.revoked.clear()


def test_a_task_at_its_last_receive_is_not_deferred():
    """SQS would move it to the dead-letter queue at the next one."""
    lease = a_lease(receive_count=3, max_receive_count=3)
    assert not strategy._defer_until_due(lease, {"eta": due_in(600)})
