"""A message that Celery has not sent becomes a task, with retries, and keeps its body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from celery_sqs_backoff import Schedule, SQSBackoffTask
from celery_sqs_backoff.foreign import s3
from tests.rig.inside.test_foreign import S3_EVENT, S3_TEST_EVENT
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


class ScannerDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="foreign.scan",
    retry_on=(ScannerDown,),
    backoff=Schedule([1]),
    max_retries=1,
)
def scan(self: Any, records: list[dict[str, Any]]) -> None:
    note(task="foreign.scan", key=records[0]["key"], id=self.request.id, n=self.request.retries)
    raise ScannerDown


from_s3 = s3("foreign.scan")


def test_an_s3_notification_is_retried_and_is_a_dead_letter_in_the_end(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    [queue] = stage.queues
    body = json.dumps(S3_EVENT)
    sent = stage.sqs.send_message(QueueUrl=queue.url, MessageBody=body)
    stage.sqs.send_message(QueueUrl=queue.url, MessageBody=json.dumps(S3_TEST_EVENT))
    foreign = {queue.name: f"{__name__}.from_s3"}
    with stage.worker(pool="threads", conf={"sqs_backoff": {"foreign": foreign}}) as worker:
        stage.wait_until_settled(timeout=30)
        assert "sqs_backoff.ignored" in worker.log()
    [letter] = stage.dead_letters()
    assert letter.body == body
    runs = stage.runs("foreign.scan")
    assert [(run["id"], run["n"]) for run in runs] == [(sent["MessageId"], n) for n in (0, 1)]
    assert {run["key"] for run in runs} == {"red flower\u00e9.jpg"}
