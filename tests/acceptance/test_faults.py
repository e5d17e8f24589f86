"""SQS fails while a worker receives and settles: each task runs once, and the queue empties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support import loop_probe
from tests.support.fault_proxy import (
    Fault,
    delayed,
    drop_after,
    expired_token,
    failed_entries,
    throttled,
    unavailable,
)
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="faults.mail",
    retry_on=ProviderDown,
    backoff=Schedule([1]),
)
def mail(self: Any, n: int, failures: int) -> None:
    note(task="faults.mail", n=n)
    if self.request.retries < failures:
        raise ProviderDown


DELETE = ("DeleteMessageBatch",)
HIDE = ("ChangeMessageVisibilityBatch",)
SETTLING = DELETE + HIDE
RECEIVE = ("ReceiveMessage",)


@pytest.mark.hazard("H5")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(unavailable(actions=SETTLING, times=3), id="503"),
        pytest.param(throttled(actions=SETTLING, times=3), id="throttled"),
        pytest.param(failed_entries(0, 3, 7, actions=SETTLING, times=3), id="some-entries-fail"),
        pytest.param(drop_after(actions=SETTLING, times=3), id="done-but-no-answer"),
    ],
)
def test_a_settlement_that_fails_is_made_good(
    make_stage: Callable[..., Stage], fault: Fault
) -> None:
    stage = make_stage()
    for n in range(20):
        stage.send("faults.mail", n, n % 2)
    assert stage.proxy is not None
    stage.proxy.inject(fault)
    with stage.worker(pool="threads", concurrency=4):
        stage.wait_until_settled(timeout=40)
    runs = Counter(run["n"] for run in stage.runs("faults.mail"))
    assert runs == {n: 1 + n % 2 for n in range(20)}
    assert sum(count.faults for count in stage.proxy.counts().values()) == 3
    assert stage.dead_letters() == []


@pytest.mark.hazard("0.1")
def test_a_worker_that_cannot_receive_goes_on_when_it_can(
    make_stage: Callable[..., Stage],
) -> None:
    """Expired credentials (403), a 503, and some seconds of no SQS at all."""
    stage = make_stage()
    assert stage.proxy is not None
    with stage.worker(pool="threads", concurrency=2) as worker:
        stage.send("faults.mail", 0, 0)
        stage.wait_until_settled()
        stage.proxy.inject(
            expired_token(actions=RECEIVE, times=2), unavailable(actions=RECEIVE, times=1)
        )
        eventually(lambda: stage.proxy.counts()["ReceiveMessage"].faults == 3, timeout=30)
        stage.proxy.unreachable(2)
        stage.send("faults.mail", 1, 0)
        stage.wait_until_settled(timeout=40)
        assert worker.is_running
        log = worker.log()
    assert [run["n"] for run in stage.runs("faults.mail")] == [0, 1]
    assert "sqs_backoff.receive_failed" in log
    assert "sqs_backoff.receiving_again" in log
    assert "Unrecoverable" not in log


@pytest.mark.hazard("H11")
def test_slow_answers_do_not_block_the_event_loop_and_settling_is_cheap(
    make_stage: Callable[..., Stage],
) -> None:
    """A hundred runs that succeed and a hundred that retry first, exactly counted."""
    stage = make_stage()
    assert stage.proxy is not None
    tasks = 200
    for n in range(tasks):
        stage.send("faults.mail", n, n % 2)
    stage.proxy.inject(delayed(0.5, actions=SETTLING, times=6))
    probe = stage.record.path.with_name("loop")
    with stage.worker(
        pool="prefork",
        concurrency=2,
        options=("--prefetch-multiplier", "20"),
        **loop_probe.options(probe),
    ):
        stage.wait_until_settled(timeout=60)
        counts = stage.proxy.counts()
        blocked = loop_probe.blockages(probe)
    runs = Counter(run["n"] for run in stage.runs("faults.mail"))
    assert runs == {n: 1 + n % 2 for n in range(tasks)}
    executions = runs.total()
    assert counts["DeleteMessageBatch"].entries == tasks
    assert counts["DeleteMessage"].calls == counts["SendMessage"].calls == 0
    settling = counts["DeleteMessageBatch"].calls + counts["ChangeMessageVisibilityBatch"].calls
    assert settling / executions <= 0.25
    assert max(blocked, default=0.0) < 0.4, blocked
