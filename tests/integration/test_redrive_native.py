"""SQS's own engine, on a server that has it: LocalStack, or SQS itself (``SQS_ENDPOINT``)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from celery_sqs_backoff.redrive import Ended, RedriveRefused
from celery_sqs_backoff.redrive.events import Progress
from celery_sqs_backoff.testing import LocalQueue
from tests.support.fault_proxy import FaultProxy

from .redrive_stage import RedriveStage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


@pytest.fixture
def stage(sqs: SQSClient, proxy: FaultProxy, queue: LocalQueue) -> RedriveStage:
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def native(stage: RedriveStage) -> RedriveStage:
    try:
        stage.sqs.list_message_move_tasks(SourceArn=stage.dlq.arn)
    except ClientError:
        pytest.skip("this server has no StartMessageMoveTask; LocalStack has")
    return stage


def test_a_server_without_it_is_named_as_the_reason(stage):
    try:
        stage.sqs.list_message_move_tasks(SourceArn=stage.dlq.arn)
    except ClientError:
        stage.fill("hello")
        with pytest.raises(RedriveRefused, match="does not have ListMessageMoveTasks"):
            stage.redrive(engine="native")
        assert stage.redrive().sent == 1
    else:
        assert stage.redrive(engine="native").sent == 0  # nothing to move


def test_everything_is_moved_and_told(native):
    bodies = native.fill_numbered(25)
    report = native.redrive(engine="native", rate="100/s")
    assert (report.sent, report.remaining, report.ended) == (25, 0, Ended.DONE)
    assert [event for event in native.events if isinstance(event, Progress)]
    assert native.bodies(native.queue) == Counter(bodies)


def test_a_stop_cancels_it(native):
    bodies = native.fill_numbered(40)
    stop = threading.Event()
    report = native.redrive(
        engine="native",
        rate="5/s",
        stop=stop,
        on_event=lambda event: stop.set() if isinstance(event, Progress) else None,
    )
    assert report.ended is Ended.INTERRUPTED
    assert 0 < report.sent < 40
    assert native.bodies(native.queue) + native.bodies(native.dlq) == Counter(bodies)
