"""Too many messages in flight: a backoff is parked in the dead-letter queue instead of hidden."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import http_error
from tests.support.processes import eventually

from .stage import REDIS, Stage, app_of_this_module

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask, name="parking.fails", retry_on=(ProviderDown,), backoff=Schedule([600])
)
def fails() -> None:
    raise ProviderDown("the provider is down")


@pytest.fixture
def conf() -> dict[str, object]:
    """Any message in flight is already too many."""
    return {"sqs_backoff": {"park_above": 1e-9}, "result_backend": REDIS}


@pytest.mark.hazard("H22")
def test_a_backoff_without_room_is_parked_with_the_delay_it_had_left(
    make_stage: Callable[..., Stage], conf: dict[str, object]
) -> None:
    stage = make_stage(conf=conf)
    results = [stage.send("parking.fails") for _ in range(3)]
    began = time.time()
    with stage.worker(concurrency=1):
        stage.wait_until_settled()
    letters = stage.dead_letters()
    assert sorted(letter.record["id"] for letter in letters) == sorted(r.id for r in results)
    for letter in letters:
        record = letter.record
        assert (record["reason"], record["outcome"]) == ("parked", "RETRYABLE")
        assert record["exception_type"].endswith("ProviderDown")
        assert 590 <= record["due_at"] - began <= 660
    assert {result.state for result in results} == {"RETRY"}, "it waits; it has not failed"
    asked = stage.proxy.counts()["GetQueueAttributes"].calls
    assert asked == 2, "at the start, then once a minute"


def test_without_leave_to_look_the_message_is_hidden_as_ever(
    make_stage: Callable[..., Stage], conf: dict[str, object]
) -> None:
    stage = make_stage(conf=conf)
    for _ in range(3):
        stage.send("parking.fails")
    with stage.worker(concurrency=1) as worker:
        stage.proxy.inject(http_error(403, "AccessDenied", actions=("GetQueueAttributes",)))
        eventually(lambda: len(stage.delays_asked()) == 3)
        assert worker.log().count("will not be parked") == 1
    assert min(stage.delays_asked()[:3]) > 590
