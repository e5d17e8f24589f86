"""How a worker can be told to stop: warm, soft, cold. No way costs a message its delay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import unavailable
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 2

#: Twice the visibility timeout: without a lease that is renewed the message would come back.
RUN_SECONDS = 4


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    name="shutdown_pools.mail",
    retry_on=(ProviderDown,),
    backoff=Schedule([600]),
)
def mail(what: str) -> None:
    note(task="shutdown_pools.mail", what=what)
    if what == "backs off":
        raise ProviderDown
    if what == "runs":
        time.sleep(RUN_SECONDS)
        note(task="shutdown_pools.mail", what="has run")


#: Signal, ``worker_soft_shutdown_timeout``, and whether the running task may end.
WARM = (signal.SIGTERM, 0.0, True)
SOFT = (signal.SIGQUIT, RUN_SECONDS + 4.0, True)
SOFT_TOO_SHORT = (signal.SIGQUIT, 1.0, False)
COLD = (signal.SIGQUIT, 0.0, False)


@pytest.mark.hazard("H14", "H15")
@pytest.mark.parametrize(
    ("pool", "how"),
    [
        pytest.param("gevent", WARM, id="gevent-warm"),
        pytest.param("prefork", WARM, id="prefork-warm"),
        pytest.param("prefork", SOFT, id="prefork-soft"),
        pytest.param("prefork", SOFT_TOO_SHORT, id="prefork-soft-too-short"),
        pytest.param("prefork", COLD, id="prefork-cold"),
    ],
)
def test_every_message_is_where_it_belongs_after_a_stop(
    make_stage: Callable[..., Stage], pool: str, how: tuple[signal.Signals, float, bool]
) -> None:
    """One has succeeded, but SQS does not know yet; one is hidden; one runs; two have not begun."""
    sig, soft_timeout, may_end = how
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}})
    assert stage.proxy is not None
    with stage.worker(
        pool=pool,
        concurrency=1,
        options=("--prefetch-multiplier", "4"),
        conf={"worker_soft_shutdown_timeout": soft_timeout},
        stop_timeout=1,
    ) as worker:
        stage.proxy.inject(unavailable(actions=("DeleteMessageBatch",)))
        stage.send("shutdown_pools.mail", "backs off")
        eventually(lambda: 600 in stage.delays_asked(), timeout=20)
        stage.send("shutdown_pools.mail", "succeeds")
        eventually(lambda: stage.asked("DeleteMessageBatch"), timeout=20)
        for what in ("runs", "waits", "waits"):
            stage.send("shutdown_pools.mail", what)
        eventually(lambda: stage.record.entries(what="runs"), timeout=20)
        eventually(lambda: received(stage) >= 4, timeout=20)  # or 5: all in one receive
        worker.send(sig)
        at_once = 5.0  # gevent: after the long poll; and to cut tasks short takes its time, too
        eventually(lambda: stage.delays_asked().count(0), timeout=at_once, message="none yet")
        stage.proxy.heal()
        assert worker.stop(sig=signal.SIGCONT, timeout=30) == 0
    assert stage.delays_asked().count(0) == received(stage) - 3 + int(not may_end)
    eventually(
        lambda: stage.messages() == (2 + int(not may_end), 1),
        timeout=2,
        message=lambda: str(stage.messages()),
    )
    assert len(stage.record.entries(what="has run")) == int(may_end)
    assert len(stage.record.entries(what="waits")) == 0
    # Longer ones than a renewal's are for the message whose delete is refused: it is kept hidden.
    assert stage.delays_asked().count(600) == 1
    assert stage.dead_letters() == []
    assert worker.log().count("reason=cancelled") == int(not may_end)


def test_a_supervisor_that_signals_the_whole_process_group_costs_no_crash_and_no_delay(
    make_stage: Callable[..., Stage],
) -> None:
    """The run is cut short. The log says why there will be another one."""
    stage = make_stage()
    with stage.worker(concurrency=1, stop_timeout=1) as worker:
        task_id = stage.send("shutdown_pools.mail", "runs").id
        eventually(lambda: stage.record.entries(what="runs"), timeout=20)
        os.killpg(worker.pid, signal.SIGTERM)
        worker.stop(sig=signal.SIGCONT, timeout=30)
        log = worker.log()
    assert stage.delays_asked()[-1] == 0
    [line] = [line for line in log.splitlines() if "sqs_backoff.retry" in line]
    assert f"id={task_id}" in line
    assert "reason=cancelled" in line
    assert "delay=0" in line


def received(stage: Stage) -> int:
    assert stage.proxy is not None
    return stage.proxy.counts()["ReceiveMessage"].messages
