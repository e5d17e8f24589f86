"""What a worker does when it stops, is killed, or is slow, and what others do then."""

from __future__ import annotations

import pytest

from celery_sqs_backoff import Retryable, Schedule

from . import Rig


def fails(self):
    raise Retryable("down")


def returns(self):
    return "done"


def test_long_run(rig):
    """A run that outlives the visibility timeout keeps its message; a body may take its time."""

    def takes_a_minute(self):
        rig.pass_time(60)

    rig.queue(VisibilityTimeout="10")
    rig.task(takes_a_minute)
    message = rig.send()
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 1)
    assert len(rig.calls("ChangeMessageVisibilityBatch")) > 3


def test_stop(rig):
    """A worker that is told to stop gives back what waits, and ends when its last task has."""
    rig.task(returns)
    first, second = rig.send(), rig.send()
    run = rig.begin()
    rig.worker.stop()
    rig.pass_time(1)
    assert (first.fate, second.fate, rig.worker.is_alive) == ("held", "visible", True)
    run.finish()
    assert (first.fate, second.fate, rig.worker.is_alive) == ("deleted", "visible", False)


def test_kill(rig):
    """A message of a worker that is killed is run by another, after its visibility timeout."""
    rig.queue(VisibilityTimeout="30")
    rig.task(returns)
    message = rig.send()
    rig.begin()
    rig.worker.kill()
    assert message.fate == "hidden"
    rig.start_worker()
    rig.pass_time(30)
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 2)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_lose_connection(rig):
    """Celery connects again: a task that runs keeps its message, and others are received."""
    rig.task(returns)
    first = rig.send()
    run = rig.begin()
    rig.worker.lose_connection()
    second = rig.send()
    run.finish()
    rig.run()
    assert (first.fate, second.fate, first.receives) == ("deleted", "deleted", 1)


def test_two_workers(rig):
    """Workers share the queue and the clock, and nothing else."""
    rig.task(fails, backoff=Schedule([7]))
    one, other = rig.start_worker(), rig.start_worker()
    message = rig.send()
    rig.pass_time(1)
    assert [len(one.runs), len(other.runs)] == [1, 0]
    one.revoke("of no task here")
    one.runs[0].finish()
    one.stop()
    rig.run()
    assert (message.receives, message.delay, other.is_alive) == (2, 7, True)


def test_latency():
    """Calls may take their time to SQS and back, and each may be under way when a worker dies."""
    with Rig() as rig:
        rig.latency = 1.0
        rig.task(returns)
        message = rig.send()
        rig.run()
        rig.worker.kill()
        rig.pass_time(2)
        assert message.fate == "deleted"
