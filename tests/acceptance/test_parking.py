"""When too many messages are in flight, the worker parks a retry in the dead-letter queue."""

from __future__ import annotations

import time

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
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
    """Run three tasks that fail while one message of the queue is in flight.

    The setting ``park_above`` is so small that one message is too many.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        stage.send("fails")
        stage.sqs.receive_message(QueueUrl=stage["test"].url, VisibilityTimeout=600)
        self.results = [stage.send("fails") for _ in range(3)]
        self.began = time.time()
        with stage.worker(concurrency=1, **KILLED):
            eventually(lambda: stage.messages() == (0, 1), timeout=60)
        assert stage.proxy is not None
        self.reads = stage.proxy.counts()["GetQueueAttributes"].calls


@pytest.fixture(scope="module")
def parked(make_scene):
    conf = {"sqs_backoff": {"park_above": 1e-9}, "result_backend": REDIS}
    return Parked(make_scene(queues={"test": {}}, conf=conf))


@pytest.mark.hazard("H22")
def test_parked(parked):
    """A parked message is a dead letter that says when it is due. Its result stays RETRY."""
    letters = [letter.record or {} for letter in parked.stage.dead_letters("test")]
    assert sorted(record["id"] for record in letters) == sorted(r.id for r in parked.results)
    for record in letters:
        assert (record["reason"], record["outcome"]) == ("parked", "RETRYABLE")
        assert record["exception_type"].endswith("ProviderDown")
        assert 590 <= record["due_at"] - parked.began <= 660
    assert {result.state for result in parked.results} == {"RETRY"}


def test_reads(parked):
    """The worker asks SQS for the number of messages in flight only once a minute."""
    assert parked.reads == 1
