"""What happens to messages when a worker stops: warm, soft or cold, in Celery's words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import unavailable
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 2

#: The shortest time of the running task. It is twice the visibility timeout, so the worker must
#: renew the timeout, or SQS delivers the message again.
RUN_SECONDS = 4

LONG_SECONDS = 600


class ProviderDown(Exception):
    pass


# With ``retry_for=1``, no retry starts later than a second after the first receive. A message that
# a worker has given back before it started must run even after this second.
@app.task(
    base=SQSBackoffTask,
    name="mail",
    retry_on=(ProviderDown,),
    backoff=Schedule([LONG_SECONDS]),
    retry_for=1,
)
def mail(queue: str, what: str, flag: str = "") -> None:
    note(task="mail", queue=queue, what=what)
    if what == "runs":
        began = time.monotonic()
        while not Path(flag).exists() or time.monotonic() < began + RUN_SECONDS:
            time.sleep(0.05)
        note(task="mail", queue=queue, what="has run")


@app.task(
    base=SQSBackoffTask,
    name="backs_off",
    retry_on=(ProviderDown,),
    backoff=Schedule([LONG_SECONDS]),
)
def backs_off() -> None:
    raise ProviderDown


#: By name: the pool, the signal, ``worker_soft_shutdown_timeout``, and whether the worker lets its
#: running task finish.
WAYS = {
    "prefork-warm": ("prefork", signal.SIGTERM, 0.0, True),
    "threads-warm": ("threads", signal.SIGTERM, 0.0, True),
    "gevent-warm": ("gevent", signal.SIGTERM, 0.0, True),
    "prefork-soft": ("prefork", signal.SIGQUIT, 30.0, True),
    "prefork-soft-too-short": ("prefork", signal.SIGQUIT, 1.0, False),
    "prefork-cold": ("prefork", signal.SIGQUIT, 0.0, False),
}
MAY_END = {way: may_end for way, (*_, may_end) in WAYS.items()}


class Stopped:
    """Stop workers that have messages in all states.

    In each worker, one task has succeeded but SQS refuses to delete its message, one message is
    hidden for a retry, one task runs, and two messages wait for the process. After the stop,
    another worker runs the messages that the worker ``prefork-warm`` has given back.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        options: dict[str, Any] = {
            way: {
                "pool": pool,
                "concurrency": 1,
                "options": ("--prefetch-multiplier", "4"),
                "conf": {"worker_soft_shutdown_timeout": soft_timeout},
                "queues": [stage[way].name],
            }
            for way, (pool, _, soft_timeout, _) in WAYS.items()
        }
        options["group"] = {"concurrency": 1, "queues": [stage["group"].name]}
        for way in WAYS:
            stage.fail(way, unavailable(actions=("DeleteMessageBatch",)))
        with stage.workers(**options) as workers:
            for way in WAYS:
                stage.send("backs_off", queue=way)
            self._wait(lambda way: LONG_SECONDS in stage.delays_asked(way))
            for way in WAYS:
                stage.send("mail", way, "succeeds", queue=way)
            self._wait(lambda way: stage.asked("DeleteMessageBatch", way))
            given_back = stage.record.path.with_name("given back")
            for way in options:
                flag = given_back if MAY_END.get(way) else given_back.with_name("never")
                stage.send("mail", way, "runs", str(flag), queue=way)
            for way in WAYS:
                stage.send("mail", way, "waits", queue=way)
                stage.send("mail", way, "waits", queue=way)
            self._wait(lambda way: self.runs(way, "runs"))
            eventually(lambda: self.runs("group", "runs"), timeout=60)
            # A worker prefetches four messages, or five if it received all in one call.
            self._wait(lambda way: stage.messages(way)[1] >= 4)
            self.received = {way: stage.messages(way)[1] for way in WAYS}
            os.killpg(workers["group"].pid, signal.SIGTERM)
            for way, (_, sig, *_) in WAYS.items():
                workers[way].send(sig)
            # A gevent worker takes long. It waits for the end of its long poll, and first ends its
            # running task.
            self._wait(lambda way: stage.delays_asked(way).count(0))
            self.still_running = [way for way in WAYS if not self.runs(way, "has run")]
            given_back.touch()
            for way in WAYS:
                stage.heal(way)
            self.codes = {way: workers[way].stop(signal.SIGCONT) for way in WAYS}
            workers["group"].stop(signal.SIGCONT)
            self.logs = {way: worker.log() for way, worker in workers.items()}
        self.left = {way: stage.messages(way) for way in WAYS}
        self.delays = {way: stage.delays_asked(way) for way in options}
        self.started = {way: len(self.runs(way, "waits")) for way in WAYS}
        with stage.worker(pool="solo", queues=[stage["prefork-warm"].name]):
            eventually(lambda: stage.messages("prefork-warm") == (0, 1), timeout=60)

    @staticmethod
    def _wait(condition: Callable[[str], object]) -> None:
        def missing() -> list[str]:
            return [way for way in WAYS if not condition(way)]

        eventually(lambda: not missing(), timeout=60, message=lambda: f"missing: {missing()}")

    def runs(self, way: str, what: str) -> list[dict[str, Any]]:
        return self.stage.record.entries(queue=way, what=what)


@pytest.fixture(scope="module")
def stopped(make_scene):
    short = {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}
    return Stopped(make_scene(queues=dict.fromkeys(WAYS, short) | {"group": {}}))


@pytest.mark.hazard("H14", "H15")
@pytest.mark.parametrize("way", WAYS)
def test_messages(stopped, way):
    """After a stop, the retried message stays hidden. Messages that have not run are visible."""
    assert stopped.codes[way] == 0
    assert stopped.left[way] == (2 + int(not MAY_END[way]), 1)
    given_back = stopped.received[way] - 3 + int(not MAY_END[way])
    assert stopped.delays[way].count(0) == given_back
    # The worker also hides the message whose delete SQS refuses, but for another time.
    assert stopped.delays[way].count(LONG_SECONDS) == 1
    assert stopped.stage.dead_letters(way) == []


@pytest.mark.hazard("H15")
@pytest.mark.parametrize("way", WAYS)
def test_running_task(stopped, way):
    """The worker lets its running task finish, or ends it, which does not count as a crash.

    It starts no task that waits for a process.
    """
    assert len(stopped.runs(way, "has run")) == int(MAY_END[way])
    assert stopped.started[way] == 0
    assert stopped.logs[way].count("reason=cancelled") == int(not MAY_END[way])
    assert not MAY_END[way] or "Traceback" not in stopped.logs[way]


def test_given_back_at_once(stopped):
    """A worker that stops gives its waiting messages back while its running task goes on."""
    assert stopped.still_running == [*WAYS]


def test_next_worker(stopped):
    """A message that was given back before it started runs although its ``retry_for`` is over."""
    assert len(stopped.runs("prefork-warm", "waits")) == 2


def test_process_group(stopped):
    """A SIGTERM to the whole process group gives the running message back at once.

    Some supervisors signal the whole group. The worker does not count this as a crash.
    """
    assert stopped.delays["group"][-1] == 0
    [line] = [line for line in stopped.logs["group"].splitlines() if "sqs_backoff.retry" in line]
    assert "reason=cancelled" in line
    assert "delay=0" in line
