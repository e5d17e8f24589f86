"""IAM actions that the worker lacks: said once per queue, and no message is lost for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_sqs_backoff import Schedule, SQSBackoffTask
from tests.support.fault_proxy import http_error
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(base=SQSBackoffTask, name="denied.succeeds")
def succeeds() -> None:
    note(task="denied.succeeds")


@app.task(base=SQSBackoffTask, name="denied.fails")
def fails() -> None:
    note(task="denied.fails")
    raise ValueError


@app.task(
    base=SQSBackoffTask, name="denied.retries", retry_on=(ProviderDown,), backoff=Schedule([1])
)
def retries() -> None:
    note(task="denied.retries")
    raise ProviderDown


def deny(stage: Stage, *actions: str) -> None:
    stage.proxy.inject(http_error(403, "AccessDenied", sender_fault=True, actions=actions))


def test_a_worker_that_may_not_read_queue_attributes_works_and_says_so_once(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    deny(stage, "GetQueueAttributes")
    with stage.worker(concurrency=1) as worker:
        for _ in range(3):
            stage.send("denied.succeeds")
        stage.wait_until_settled()
        assert worker.log().count("needs sqs:GetQueueAttributes") == 1
        assert "Traceback" not in worker.log()
    assert len(stage.runs("denied.succeeds")) == 3


def test_dead_letters_that_may_not_be_sent_stay_on_the_queue_and_do_not_run(
    make_stage: Callable[..., Stage],
) -> None:
    """They are held until the permission is there, and then sent, once each."""
    stage = make_stage()
    deny(stage, "SendMessageBatch")
    with stage.worker(concurrency=1) as worker:
        for _ in range(3):
            stage.send("denied.fails")
        eventually(lambda: stage.proxy.counts()["SendMessageBatch"].calls >= 3)
        assert worker.log().count("SQS refuses to send dead letters") == 1
        assert stage.messages() == (0, 3)
        assert stage.dead_letters() == []
        stage.proxy.heal()
        stage.wait_until_settled()
    assert len(stage.runs("denied.fails")) == 3
    assert len(stage.dead_letters()) == 3


def test_a_dead_letter_queue_that_is_gone_keeps_its_messages_on_the_queue(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    with stage.worker(concurrency=1) as worker:
        stage.proxy.inject(
            http_error(
                400,
                "AWS.SimpleQueueService.NonExistentQueue",
                sender_fault=True,
                actions=("SendMessageBatch",),
            )
        )
        stage.send("denied.fails")
        eventually(lambda: stage.proxy.counts()["SendMessageBatch"].calls >= 2)
        assert worker.log().count("SQS refuses to send dead letters") == 1
    assert stage.messages() == (0, 1)
    assert len(stage.runs("denied.fails")) == 1


@pytest.mark.hazard("H5")
def test_backoffs_that_may_not_be_set_leave_the_delay_to_the_queue(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(queues={"test": {"visibility_timeout_seconds": 2}})
    deny(stage, "ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
    with stage.worker(concurrency=1) as worker:
        for _ in range(2):
            stage.send("denied.retries")
        eventually(lambda: len(stage.runs("denied.retries")) >= 4, timeout=15)
        said = worker.log().count("SQS refuses to hide messages")
    assert said == 1, worker.log()
