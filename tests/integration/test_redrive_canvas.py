"""After a redrive of a failed task, its chain goes on, but its chord stays failed."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord

from celery_sqs_backoff import NonRetryable, SQSBackoffTask, redrive
from celery_sqs_backoff.testing import LocalQueue
from tests.support.processes import eventually


@pytest.fixture
def canvas(sqs_celery_app):
    """Three tasks. The first fails until the test sets ``broken`` to False."""
    state = {"broken": True, "ran": []}

    @sqs_celery_app.task(base=SQSBackoffTask, name="canvas.first")
    def first():
        if state["broken"]:
            raise NonRetryable("not yet", not_processed=True)
        state["ran"].append("first")
        return 1

    @sqs_celery_app.task(base=SQSBackoffTask, name="canvas.other")
    def other():
        return 2

    @sqs_celery_app.task(base=SQSBackoffTask, name="canvas.then")
    def then(value):
        state["ran"].append(("then", value))

    return state | {"state": state, "first": first, "other": other, "then": then}


def depth(client: Any, queue: LocalQueue) -> int:
    found = client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])["Attributes"]
    return sum(int(v) for k, v in found.items() if k.startswith("ApproximateNumberOf"))


def test_chain_goes_on(sqs_celery_app, sqs_worker, sqs_queue, sqs_client, canvas):
    """A chain goes on after a redrive of its failed task."""
    with sqs_worker():
        chain(canvas["first"].s(), canvas["then"].s()).delay()
        eventually(lambda: depth(sqs_client, sqs_queue.dlq) == 1, timeout=20)
        canvas["state"]["broken"] = False
        assert redrive(sqs_celery_app, sqs_queue.name).sent == 1
        eventually(lambda: canvas["state"]["ran"] == ["first", ("then", 1)], timeout=20)


def test_chord_stays_failed(sqs_celery_app, sqs_worker, sqs_queue, sqs_client, canvas):
    """A chord that has failed stays failed after a redrive of its failed task."""
    with sqs_worker():
        result = chord([canvas["first"].s(), canvas["other"].s()])(canvas["then"].s())
        eventually(lambda: depth(sqs_client, sqs_queue.dlq) == 1, timeout=20)
        eventually(result.ready, timeout=20)
        assert result.failed()
        canvas["state"]["broken"] = False
        assert redrive(sqs_celery_app, sqs_queue.name).sent == 1
        eventually(lambda: canvas["state"]["ran"] == ["first"], timeout=20)
        eventually(lambda: depth(sqs_client, sqs_queue) == 0, timeout=20)
    assert canvas["state"]["ran"] == ["first"], "the body of the chord has run"
    assert result.failed()
