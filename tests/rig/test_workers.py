"""What happens to messages when a worker stops, is killed, or is slow."""

from __future__ import annotations

import pytest

from celery_sqs_backoff import Retryable, Schedule

from . import Rig


def fails(self):
    raise Retryable("down")


def returns(self):
    return "done"


def test_long_run(rig):
    """A task that runs longer than the visibility timeout runs once."""

    def takes_a_minute(self):
        rig.pass_time(60)

    rig.queue(VisibilityTimeout="10")
    rig.task(takes_a_minute)
    message = rig.send()
    rig.run()
    assert (message.fate, message.receives) == ("deleted", 1)
    assert len(rig.calls("ChangeMessageVisibilityBatch")) > 3


def test_stop(rig):
    """A worker that gets SIGTERM gives waiting messages back, and ends after its last task."""
    rig.task(returns)
    first, second = rig.send(), rig.send()
    run = rig.begin()
    rig.worker.stop()
    rig.pass_time(1)
    assert (first.fate, second.fate, rig.worker.is_alive) == ("held", "visible", True)
    run.finish()
    assert (first.fate, second.fate, rig.worker.is_alive) == ("deleted", "visible", False)


def test_kill(rig):
    """If a worker is killed, another one runs its message after the visibility timeout."""
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
    """After a lost connection, a running task keeps its message, and the worker receives others."""
    rig.task(returns)
    first = rig.send()
    run = rig.begin()
    rig.worker.lose_connection()
    second = rig.send()
    run.finish()
    rig.run()
    assert (first.fate, second.fate, first.receives) == ("deleted", "deleted", 1)


def test_two_workers(rig):
    """One worker's stop and revoked tasks do not affect another worker on the same queue."""
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
    """A delete that is under way when the worker is killed still reaches SQS."""
    with Rig() as rig:
        rig.latency = 1.0
        rig.task(returns)
        message = rig.send()
        rig.run()
        rig.worker.kill()
        rig.pass_time(2)
        assert message.fate == "deleted"
