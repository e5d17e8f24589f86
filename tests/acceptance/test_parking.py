"""Too many messages in flight: a backoff is parked in the dead-letter queue instead of hidden."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import http_error
from tests.support.processes import eventually

from .stage import KILLED, REDIS, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(base=SQSBackoffTask, name="fails", retry_on=(ProviderDown,), backoff=Schedule([600]))
def fails() -> None:
    raise ProviderDown("the provider is down")


class Parked:
    """Any message in flight is too many; of one queue the worker may not read the number."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        with stage.worker(concurrency=1, **KILLED) as worker:
            refused = http_error(403, "AccessDenied", actions=("GetQueueAttributes",))
            stage.fail("denied", refused)
            self.began = time.time()
            self.results = [stage.send("fails", queue="test") for _ in range(3)]
            for _ in range(3):
                stage.send("fails", queue="denied")
            stage.wait_until_settled("test")
            eventually(lambda: len(stage.delays_asked("denied")) >= 3, timeout=30)
            self.log = worker.log()


@pytest.fixture(scope="module")
def parked(make_scene: Callable[..., Stage]) -> Parked:
    conf: dict[str, Any] = {"sqs_backoff": {"park_above": 1e-9}, "result_backend": REDIS}
    return Parked(make_scene(queues={"test": {}, "denied": {}}, conf=conf))


@pytest.mark.hazard("H22")
def test_parked(parked: Parked) -> None:
    """A backoff without room is a dead letter with the delay it had left, and has not failed."""
    letters = [letter.record or {} for letter in parked.stage.dead_letters("test")]
    assert sorted(record["id"] for record in letters) == sorted(r.id for r in parked.results)
    for record in letters:
        assert (record["reason"], record["outcome"]) == ("parked", "RETRYABLE")
        assert record["exception_type"].endswith("ProviderDown")
        assert 590 <= record["due_at"] - parked.began <= 660
    assert {result.state for result in parked.results} == {"RETRY"}


def test_no_permission(parked: Parked) -> None:
    """Without leave to read the number of messages the worker hides them, and says so once."""
    assert min(parked.stage.delays_asked("denied")[:3]) > 590
    assert parked.stage.dead_letters("denied") == []
    assert parked.log.count("will not be parked") == 1
