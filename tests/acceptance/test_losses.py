"""No message is lost when SQS fails, a connection breaks, or a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery.signals import worker_ready

from celery_sqs_backoff import Schedule, SQSBackoffTask
from celery_sqs_backoff.signals import lease_lost
from tests.support import loop_probe
from tests.support.differences import STALE_HANDLE_IS_REFUSED, differs
from tests.support.fault_proxy import (
    delayed,
    expired_token,
    unavailable,
)
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()

DELETE = ("DeleteMessageBatch",)
HIDE = ("ChangeMessageVisibilityBatch",)
SETTLING = DELETE + HIDE


class ProviderDown(Exception):
    pass


def task(name: str, **options: Any) -> Any:
    return app.task(
        **{
            "name": name,
            "base": SQSBackoffTask,
            "bind": True,
            "retry_on": (ProviderDown,),
            "backoff": Schedule([1]),
        }
        | options
    )


@task("mail")
def mail(self: Any, queue: str, n: int, failures: int = 0) -> None:
    note(task="mail", queue=queue, n=n)
    if self.request.retries < failures:
        raise ProviderDown


@task("lasts")
def lasts(self: Any, queue: str, name: str, seconds: float) -> None:
    note(task="lasts", queue=queue, name=name, what="start", redelivered=self.request.retries)
    time.sleep(seconds)
    note(task="lasts", queue=queue, name=name, what="end")


@task("fails")
def fails(self: Any) -> None:
    raise ValueError("for good")


@task("until_lost")
def until_lost(self: Any, queue: str, at_most_seconds: float, flag: str) -> None:
    """Run until the worker has lost its lease on the message, and then until a file exists."""
    note(task="until_lost", queue=queue, what="start")
    deadline = time.monotonic() + at_most_seconds
    while not self.lease_lost and time.monotonic() < deadline:
        time.sleep(0.05)
    while not Path(flag).exists():
        time.sleep(0.05)
    note(task="until_lost", queue=queue, what="end", lost=self.lease_lost)


@connect_in_worker(lease_lost)
def note_signal(sender: Any, message_id: str, queue: str, task_id: str, **_: object) -> None:
    note(task=sender.name, what="signal", message_id=message_id, on=queue, id=task_id)


CUT = "the test has cut the connection"


@worker_ready.connect(weak=False)
def lose_the_connection_on_request(sender: Any, **_: Any) -> None:
    """On SIGUSR2, raise in Celery's event loop the error of a broken broker connection."""

    def break_off() -> None:
        raise ConnectionResetError(CUT)

    def on_signal(*_: object) -> None:
        sender.hub.call_soon(break_off)

    if sender.hub is not None:
        signal.signal(signal.SIGUSR2, on_signal)


# A message that another consumer has received


LOSING_POOLS = ("prefork", "threads", "gevent")


class Taken:
    """Let a worker's calls fail until the message of its running task is visible again.

    In each pool of ``LOSING_POOLS``, the test then receives the message as another consumer. On the
    queue ``back``, the worker receives the message itself while the task still runs.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        options: dict[str, Any] = {
            pool: {"pool": pool, "concurrency": 1, "queues": [stage[pool].name]}
            for pool in LOSING_POOLS
        }
        for each in options.values():
            each["options"] = ("--prefetch-multiplier", "1")
        options["back"] = {"concurrency": 2, "queues": [stage["back"].name]}
        # Deletes fail too. Otherwise a task could end, and its message be deleted, before anybody
        # receives the message again.
        for queue in options:
            stage.fail(queue, unavailable(actions=SETTLING))
        with stage.workers(**options):
            # The tasks run until this file exists, so no worker has a free process. A worker with a
            # free process would receive its own message again before the test does.
            taken = stage.record.path.with_name("taken")
            self.sent = {
                pool: stage.send("until_lost", pool, 30, str(taken), queue=pool).id
                for pool in LOSING_POOLS
            }
            stage.send("until_lost", "back", 4, str(stage.record.path), queue="back")
            eventually(lambda: len(stage.record.entries(what="start")) == 4, timeout=60)
            self.taken = {pool: self._receive(pool) for pool in LOSING_POOLS}
            for pool in LOSING_POOLS:
                stage.heal(pool)
            taken.touch()
            eventually(lambda: self.entries("back", "end"), timeout=60)
            stage.heal("back")
            stage.wait_until_settled("back")
            eventually(lambda: all(self.entries(pool, "end") for pool in LOSING_POOLS), timeout=60)
        self.left = {pool: stage.messages(pool) for pool in LOSING_POOLS}

    def _receive(self, pool: str) -> str:
        [message] = eventually(
            lambda: self.stage.sqs.receive_message(
                QueueUrl=self.stage[pool].url, VisibilityTimeout=60, WaitTimeSeconds=5
            ).get("Messages"),
            timeout=60,
        )
        return str(message["MessageId"])

    def entries(self, queue: str, what: str) -> list[dict[str, Any]]:
        return self.stage.record.entries(queue=queue, what=what)


@pytest.fixture(scope="module")
def taken(make_scene):
    short = {"visibility_timeout_seconds": 2}
    stage = make_scene(queues=dict.fromkeys([*LOSING_POOLS, "back"], short))
    return Taken(stage)


@pytest.mark.parametrize("pool", LOSING_POOLS)
def test_lost_lease(taken, pool):
    """When another consumer has its message, the task's ``lease_lost`` is true.

    The worker also sends the signal ``lease_lost``.
    """
    [end] = taken.entries(pool, "end")
    assert end["lost"]
    [signal] = taken.stage.record.entries(what="signal", on=taken.stage[pool].name)
    assert (signal["id"], signal["message_id"]) == (taken.sent[pool], taken.taken[pool])


@pytest.mark.parametrize("pool", LOSING_POOLS)
def test_lost_message_is_left_alone(taken, pool):
    """The worker does not make a message visible that another consumer has received."""
    if differs(STALE_HANDLE_IS_REFUSED):
        assert taken.left[pool] == (0, 1), "the other consumer still has the message"
    else:
        # This server may accept a delete with the worker's old receipt handle.
        assert taken.left[pool] in ((0, 1), (0, 0))
    assert 0 not in taken.stage.delays_asked(pool)


def test_own_message_comes_back(taken):
    """A task does not run twice if its worker receives the message again while the task runs."""
    assert len(taken.entries("back", "start")) == len(taken.entries("back", "end")) == 1
    assert taken.stage.dead_letters("back") == []


# A connection that is lost while tasks run


RECONNECTING_POOLS = ("prefork", "threads", "gevent")
OUTAGE_SECONDS = 4


class Reconnected:
    """Break the connection of running workers, and then cut them off from SQS for some seconds.

    The broken connection makes Celery restart its consumer. A gevent worker has no event loop in
    which the test could break it, so there the consumer goes on.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        options: dict[str, Any] = {
            pool: {"pool": pool, "concurrency": 2, "queues": [stage[pool].name]}
            for pool in RECONNECTING_POOLS
        }
        assert stage.proxy is not None
        with stage.workers(**options) as workers:
            for pool in RECONNECTING_POOLS:
                for name in ("first", "second"):
                    stage.send("lasts", pool, name, 4, queue=pool)
            self._wait_for("start", 2)
            for pool in RECONNECTING_POOLS:
                stage.send("lasts", pool, "waits-meanwhile", 0, queue=pool)
                if pool != "gevent":
                    os.kill(workers[pool].pid, signal.SIGUSR2)
            cut_off = [workers[pool] for pool in ("prefork", "threads")]
            eventually(lambda: all(CUT in worker.log() for worker in cut_off), timeout=60)
            stage.wait_until_settled(timeout=60)

            for pool in RECONNECTING_POOLS:
                stage.send("lasts", pool, "ends-during-outage", 2, queue=pool)
                stage.send("lasts", pool, "ends-after-outage", OUTAGE_SECONDS + 2, queue=pool)
            self._wait_for("start", 5)
            stage.proxy.unreachable(OUTAGE_SECONDS)
            for pool in RECONNECTING_POOLS:  # after the outage, two more calls fail
                stage.fail(pool, expired_token(times=2))
            stage.wait_until_settled(timeout=60)
            for pool in RECONNECTING_POOLS:
                stage.send("lasts", pool, "afterwards", 0, queue=pool)
            stage.wait_until_settled(timeout=60)
            self.is_running = {pool: worker.is_running for pool, worker in workers.items()}
            self.logs = {pool: worker.log() for pool, worker in workers.items()}
            self.faults = sum(count.faults for count in stage.proxy.counts().values())

    def _wait_for(self, what: str, times: int) -> None:
        def have() -> list[int]:
            return [self.count(pool, what).total() for pool in RECONNECTING_POOLS]

        eventually(lambda: min(have()) >= times, timeout=60, message=lambda: str(have()))

    def count(self, pool: str, what: str) -> Counter[str]:
        return Counter(e["name"] for e in self.stage.record.entries(queue=pool, what=what))


@pytest.fixture(scope="module")
def reconnected(make_scene):
    # Messages stay hidden during the outage, because the visibility timeout is a little longer.
    short = {"visibility_timeout_seconds": OUTAGE_SECONDS + 2}
    return Reconnected(make_scene(queues=dict.fromkeys(RECONNECTING_POOLS, short)))


@pytest.mark.hazard("0.1", "0.3", "H13", "H28")
@pytest.mark.parametrize("pool", RECONNECTING_POOLS)
def test_reconnect(reconnected, pool):
    """Each task runs once, and the worker deletes its message once, when the connection breaks.

    Stock Celery would make the messages of running tasks visible again, and not delete them.
    """
    starts, ends = reconnected.count(pool, "start"), reconnected.count(pool, "end")
    assert len(starts) == 6
    assert set(starts.values()) == {1}
    assert starts == ends
    deleted = {e["ReceiptHandle"] for e in reconnected.stage.asked("DeleteMessageBatch", pool)}
    assert len(deleted) == 6
    assert reconnected.stage.dead_letters(pool) == []


@pytest.mark.hazard("0.2")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_consumer_restarts(reconnected, pool):
    """The worker receives messages again after Celery has restarted its consumer.

    Stock Celery 5.7.0 does not.
    """
    assert "Connection to broker lost" in reconnected.logs[pool]
    assert reconnected.count(pool, "end")["afterwards"] == 1


@pytest.mark.hazard("0.1", "H28")
@pytest.mark.parametrize("pool", RECONNECTING_POOLS)
def test_outage(reconnected, pool):
    """A worker survives an outage of SQS and expired credentials. It logs failure and recovery."""
    assert reconnected.is_running[pool]
    assert reconnected.faults == 2 * len(RECONNECTING_POOLS)
    log = reconnected.logs[pool]
    assert "sqs_backoff.receive_failed" in log
    assert "sqs_backoff.receiving_again" in log
    assert "Unrecoverable" not in log


# Calls that fail


@pytest.mark.hazard("H11")
def test_slow_answers(make_stage):
    """Slow responses of SQS do not block the event loop.

    The worker needs at most 0.3 calls per run to delete or hide the message.
    """
    stage = make_stage()
    assert stage.proxy is not None
    tasks = 200
    for n in range(tasks):
        stage.send("mail", "test", n, n % 2)
    stage.proxy.inject(delayed(0.5, actions=SETTLING, times=6))
    probe = stage.record.path.with_name("loop")
    options = {"options": ("--prefetch-multiplier", "20"), **loop_probe.options(probe)}
    with stage.worker(concurrency=2, **options, **KILLED):
        stage.wait_until_settled(timeout=60)
        counts = stage.proxy.counts()
        blocked = loop_probe.blockages(probe)
    runs = Counter(run["n"] for run in stage.runs("mail"))
    assert runs == {n: 1 + n % 2 for n in range(tasks)}
    assert counts["DeleteMessageBatch"].entries == tasks
    assert counts["DeleteMessage"].calls == counts["SendMessage"].calls == 0
    settling = counts["DeleteMessageBatch"].calls + counts["ChangeMessageVisibilityBatch"].calls
    assert settling / runs.total() <= 0.3, "it is 0.2 on a machine that is not busy"
    assert max(blocked, default=0.0) < 0.4, blocked


# The whole worker is killed


@task("killed.succeeds", backoff=Schedule([2]))
def succeeds(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="end")


@task("killed.lasts", backoff=Schedule([2]))
def lasts_long(self: Any, n: int) -> None:
    note(task=self.name, n=n, what="start")
    if self.request.retries == 0:
        time.sleep(30)
    note(task=self.name, n=n, what="end")


@task("killed.retries", backoff=Schedule([2]))
def retries(self: Any, n: int) -> None:
    if self.request.retries == 0:
        raise ProviderDown
    note(task=self.name, n=n, what="end")


@task("killed.fails", backoff=Schedule([2]))
def fails_for_good(self: Any, n: int) -> None:
    raise ValueError


#: The number of messages per queue. Each queue has the name of its task. The two of ``lasts`` keep
#: two of the three processes busy.
KILLED_TASKS = {"lasts": 2, "retries": 6, "fails": 6, "succeeds": 6}
#: The calls about each queue that SQS refuses until the worker is killed.
REFUSED = {"lasts": (), "retries": SETTLING, "fails": DELETE, "succeeds": DELETE}


@pytest.fixture(scope="module")
def killed(make_scene):
    """Kill a worker with all its processes, and let another worker do the rest.

    At that moment the first worker runs tasks, and SQS refuses its deletes and its delays.
    """
    short = {"visibility_timeout_seconds": 2, "max_receive_count": 100}
    stage = make_scene(queues=dict.fromkeys(REFUSED, short))
    for queue, refused in REFUSED.items():
        if refused:
            stage.fail(queue, unavailable(actions=refused))

    def send(queue):
        for n in range(KILLED_TASKS[queue]):
            stage.send(f"killed.{queue}", n, queue=queue)

    with stage.worker(concurrency=3, options=("--prefetch-multiplier", "8")) as worker:
        send("lasts")
        eventually(lambda: len(stage.runs("killed.lasts")) == 2, timeout=60)
        send("retries")
        eventually(lambda: stage.delays_asked("retries"), timeout=60)
        send("fails")
        send("succeeds")
        # Kill the worker soon. While SQS refuses a delete, the worker hides that message for an
        # ever longer time, and the next worker would have to wait until this time is over.
        eventually(lambda: stage.asked("SendMessageBatch", stage["fails"].dlq), timeout=60)
        eventually(lambda: stage.asked(*DELETE, "fails"), timeout=60)
        eventually(lambda: stage.asked(*DELETE, "succeeds"), timeout=60)
        worker.kill()
    for queue in REFUSED:
        assert sum(stage.messages(queue)) == KILLED_TASKS[queue]
        stage.heal(queue)
    with stage.worker(pool="threads", concurrency=4):
        stage.wait_until_settled(timeout=60)
    return stage


@pytest.mark.parametrize("queue", ["lasts", "succeeds", "retries"])
def test_killed_while(killed, queue):
    """No message is lost when a worker dies during its task, or before SQS deletes or hides it."""
    ended = killed.record.entries(task=f"killed.{queue}", what="end")
    assert {entry["n"] for entry in ended} == set(range(KILLED_TASKS[queue]))
    assert killed.dead_letters(queue) == []


def test_killed_while_giving_up(killed):
    """A worker that dies while it gives a message up leaves one dead letter of it, or two."""
    letters = killed.dead_letters("fails")
    assert {letter.record and letter.record["task"] for letter in letters} == {"killed.fails"}
    assert KILLED_TASKS["fails"] <= len(letters) <= 2 * KILLED_TASKS["fails"]
