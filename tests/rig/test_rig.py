"""Each verb of the rig, in one test: what a worker does then, seen from outside."""

from __future__ import annotations

import pytest

from celery_sqs_backoff import Provider, Retryable, Schedule

from . import Rig


def fails(self):
    raise Retryable("down")


def returns(self):
    return "done"


def test_run(rig):
    """A task that succeeds is deleted, and its result is stored."""
    rig.task(returns)
    message = rig.send()
    run = rig.run()
    assert (message.fate, message.result) == ("deleted", "SUCCESS")
    assert run.result == (0, "'done'", run.result[2])
    assert [event.outcome for event in rig.told("RunEnded")] == ["succeeded"]


def test_retry(rig):
    """A task that fails for a while is hidden, comes back when it is due, and runs again."""
    rig.task(fails, backoff=Schedule([7, 60]))
    message = rig.send()
    rig.run()
    assert (message.fate, message.delay, message.result) == ("hidden", 7, "RETRY")
    hidden_at = rig.timeline.now
    rig.run()
    assert (message.delay, message.receives) == (60, 2)
    assert rig.timeline.now - hidden_at == pytest.approx(7, abs=0.5)


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


def test_revoke(rig):
    """A task that is revoked and terminated is not run again."""
    rig.task(returns)
    message = rig.send()
    rig.begin()
    rig.worker.revoke(message.task_id, terminate=True)
    rig.pass_time(1)
    assert (message.fate, message.result, rig.worker.runs) == ("deleted", "REVOKED", [])


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


def test_fault(rig):
    """A delete that SQS refuses is sent again, and so is one whose answer is lost."""
    rig.task(returns)
    rig.fault("DeleteMessageBatch", times=2)
    rig.fault("DeleteMessageBatch", ConnectionError(), answer_lost=True)
    message = rig.send()
    rig.run()
    rig.pass_time(10)
    assert (message.fate, len(rig.calls("DeleteMessageBatch"))) == ("deleted", 4)
    assert message.receives == 1


def test_outage(rig):
    """While SQS is away a worker goes on asking."""
    rig.task(returns)
    rig.worker  # noqa: B018 - starts
    rig.pass_time(1)
    rig.fault("*", ConnectionError(), seconds=60)
    message = rig.send()
    rig.pass_time(59)
    assert (message.fate, message.receives) == ("visible", 0)
    assert rig.told("ReceiveFailed")
    rig.run()
    assert message.fate == "deleted"


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


def test_provider(rig):
    """Messages of a provider that is down wait without running until a probe has succeeded."""
    is_down = True

    def body(self):
        if is_down:
            raise Retryable("down")

    rig.task(body, provider=Provider("mail"))
    rig.start_worker(processes=4)
    for _ in range(60):
        rig.send()
    while not rig.told("ProviderPaused") or rig.worker.runs:
        rig.run()
    not_begun = 60 - len(rig.told("RunEnded"))
    assert not_begun > 20
    is_down = False
    rig.run()
    assert [event.outcome for event in rig.told("RunEnded")[-1:]] == ["succeeded"]
    for _ in range(not_begun - 1):
        rig.run()


def test_rate_limit(rig):
    """Celery's rate limit goes by the virtual clock."""
    rig.task(returns, rate_limit="1/m")
    rig.start_worker(processes=4)
    messages = [rig.send(), rig.send()]
    rig.run()
    rig.pass_time(30)
    assert rig.worker.runs == []
    rig.pass_time(31)
    rig.run()
    assert [each.fate for each in messages] == ["deleted", "deleted"]


def test_countdown(rig):
    """A task with an ETA is run when it is due, after the longest delay of SQS too."""
    rig.task(returns)
    message = rig.send(countdown=2_000)
    rig.pass_time(1_999)
    assert rig.worker.runs == []
    rig.run()
    assert message.fate == "deleted"


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
